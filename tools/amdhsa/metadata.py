"""The AMDGPU metadata note of a code object: MessagePack, one map per kernel."""
from . import msgpack
from .failure import Failure
from .target import MAX_WORKGROUP

OWNER, TYPE = b"AMDGPU", 32
# The keys without which a runtime cannot load a kernel, and what they hold.
REQUIRED = {".name": str, ".symbol": str, ".kernarg_segment_size": int, ".kernarg_segment_align": int,
            ".group_segment_fixed_size": int, ".private_segment_fixed_size": int,
            ".wavefront_size": int, ".sgpr_count": int, ".vgpr_count": int,
            ".max_flat_workgroup_size": int}
OPTIONAL = {".args": list}
SOMETIMES = {".agpr_count": int}  # of later versions
ARGUMENT = {".offset": int, ".size": int, ".value_kind": str}


def require(where, value, keys):
    if not isinstance(value, dict):
        raise Failure(f"{where} is not a map")
    for key, kind in keys.items():
        if key not in value:
            raise Failure(f"{where} has no {key}")
        typed(where, key, value[key], kind)


def typed(where, key, value, kind):
    # A bool is an int to Python.
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {int: "an integer", str: "a string", list: "an array"}
        raise Failure(f"{where}: {key} is not {names[kind]}")


def notes(elf):
    return [data for owner, kind, data in elf.notes() if (owner, kind) == (OWNER, TYPE)]


def read(elf):
    """(target, {symbol of the descriptor: a kernel's map}); arguments are a list, in .args. The target is
    None where it is not said."""
    found = notes(elf)
    where = f"{elf.name}: the AMDGPU metadata"
    if len(found) != 1:
        raise Failure(f"{elf.name} has {len(found)} AMDGPU metadata notes, not 1")
    try:
        root = msgpack.read(found[0])
    except Failure as failure:
        raise Failure(f"{where} is not MessagePack: {failure}") from None
    require(where, root, {"amdhsa.version": list, "amdhsa.kernels": list})
    target = root.setdefault("amdhsa.target", None)
    if target is not None:
        typed(where, "amdhsa.target", target, str)
    if root["amdhsa.version"][:1] != [1]:
        raise Failure(f"{where} has version {root['amdhsa.version']}, not 1.x")
    kernels = {}
    for i, kernel in enumerate(root["amdhsa.kernels"]):
        require(f"{where}: kernel {i}", kernel, REQUIRED)
        name = f"{where}: kernel {kernel['.name']}"
        for key, kind in OPTIONAL.items():
            typed(name, key, kernel.setdefault(key, kind()), kind)
        for key, kind in SOMETIMES.items():
            if key in kernel:
                typed(name, key, kernel[key], kind)
        for j, argument in enumerate(kernel[".args"]):
            require(f"{name}: argument {j}", argument, ARGUMENT)
        if kernel[".symbol"] in kernels:
            raise Failure(f"{name} is there twice")
        kernels[kernel[".symbol"]] = kernel
    return target, kernels


def argument_name(kernel, index):
    return kernel[".args"][index].get(".name", f"argument {index}")


def other_allocation(kernel, key, allocated, actual):
    return (f"the metadata's {key} {kernel[key]} is an allocation of {allocated}, the descriptor's is "
            f"{actual}")


def doubts(kernel, descriptor, target):
    """Sentences on what harms nothing: how many SGPRs a wave gets is the descriptor's word."""
    allocated = target.allocated_sgprs(kernel[".sgpr_count"])
    if allocated < descriptor.sgprs:
        yield other_allocation(kernel, ".sgpr_count", allocated, descriptor.sgprs)


def contradictions(kernel, descriptor, target):
    """Sentences on what a kernel's metadata says against its descriptor or against itself."""
    wanted = [(".group_segment_fixed_size", descriptor.group_segment_fixed_size),
              (".private_segment_fixed_size", descriptor.private_segment_fixed_size),
              (".kernarg_segment_size", descriptor.kernarg_size or kernel[".kernarg_segment_size"])]
    for key, value in wanted:
        if kernel[key] != value:
            yield f"the metadata's {key} is {kernel[key]}, the descriptor's {value}"
    vgprs = target.allocated_vgprs(kernel[".vgpr_count"])
    if vgprs != descriptor.vgprs:
        yield other_allocation(kernel, ".vgpr_count", vgprs, descriptor.vgprs)
    sgprs = target.allocated_sgprs(kernel[".sgpr_count"])
    if sgprs > descriptor.sgprs:
        yield other_allocation(kernel, ".sgpr_count", sgprs, descriptor.sgprs)
    if kernel[".wavefront_size"] != 64:
        yield f"the metadata's .wavefront_size is {kernel['.wavefront_size']}; 64 is accepted"
    if not 1 <= kernel[".max_flat_workgroup_size"] <= MAX_WORKGROUP:
        yield (f"the metadata's .max_flat_workgroup_size is {kernel['.max_flat_workgroup_size']}; 1 to "
               f"{MAX_WORKGROUP} are accepted")
    end, last = 0, None
    for i, argument in sorted(enumerate(kernel[".args"]), key=lambda item: item[1][".offset"]):
        name = argument_name(kernel, i)
        begin = argument[".offset"]
        if begin < end:
            yield f"{name} at kernarg byte {begin} overlaps {last}, which ends at {end}"
        end, last = begin + argument[".size"], name
        if end > kernel[".kernarg_segment_size"]:
            yield f"{name} ends at kernarg byte {end} of {kernel['.kernarg_segment_size']}"
    if kernel[".args"] and not descriptor.kernarg_ptr:
        yield "there are arguments, but no kernarg_segment_ptr"

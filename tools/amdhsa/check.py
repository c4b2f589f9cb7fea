"""Descriptors against code and metadata."""
from dataclasses import dataclass, field

from . import code, metadata
from .target import ENTRY_ALIGNMENT


@dataclass
class Findings:
    kernel: str
    errors: list = field(default_factory=list)
    warnings: list = field(default_factory=list)


def cost(waves, possible):
    if waves == possible:
        return "costs no occupancy"
    return f"allows {waves} waves per SIMD instead of {possible}"


def check_registers(kernel, target, found):
    descriptor, use = kernel.descriptor, kernel.use
    # An error without AGPRs too. Registers beyond accum_offset then work where the whole file covers them, but that rests on
    # how the hardware arranges its file; no document of AMD's promises it.
    if use.v > descriptor.accum_offset:
        found.errors.append(
            f"accum_offset {descriptor.accum_offset} is too small, {use.accum_offset} is needed: "
            f"'{use.touched_by['v']}' touches v{use.v - 1}")
    # The AGPRs start where the descriptor says, if that is not itself too low.
    needed = use.vgprs
    if use.a:
        needed = max(descriptor.accum_offset, use.accum_offset) + use.a
    if needed > descriptor.vgprs:
        touched = use.touched_by["a" if use.a else "v"]
        found.errors.append(f"{descriptor.vgprs} VGPRs are allocated, {needed} are needed: '{touched}'")
    sgprs = kernel.sgprs(target)
    if sgprs > descriptor.sgprs:
        found.errors.append(
            f"{descriptor.sgprs} SGPRs are allocated, {sgprs} are needed: s0..s"
            f"{sgprs - target.extra_sgprs - 1} and {target.extra_sgprs} for VCC, FLAT_SCRATCH and "
            "XNACK_MASK")
    if found.errors:
        return
    allocated = target.allocated_vgprs(use.vgprs)
    if descriptor.accum_offset > use.accum_offset or descriptor.vgprs > allocated:
        found.warnings.append(
            f"accum_offset {descriptor.accum_offset} and {descriptor.vgprs} VGPRs are larger than "
            f"needed ({use.accum_offset} and {use.vgprs}), which "
            + cost(target.waves_by_vgprs(descriptor.vgprs), target.waves_by_vgprs(allocated)))
    allocated = target.allocated_sgprs(sgprs)
    if descriptor.sgprs > allocated:
        found.warnings.append(
            f"{descriptor.sgprs} SGPRs are more than needed ({sgprs}), which "
            + cost(target.waves_by_sgprs(descriptor.sgprs), target.waves_by_sgprs(allocated)))
    for kind, instruction in use.indexed.items():
        found.warnings.append(f"'{instruction}' indexes registers; which it reaches cannot be seen, only "
                              f"{kind}0..{kind}{getattr(use, kind) - 1} are named")


def check_kernel(kernel, target):
    found = Findings(kernel.name)
    descriptor, use = kernel.descriptor, kernel.use
    if kernel.entry % ENTRY_ALIGNMENT:
        found.errors.append(f"the entry is at 0x{kernel.entry:x}; a multiple of {ENTRY_ALIGNMENT} is accepted")
    if use.unseen:
        found.warnings.append(code.leaves(use.unseen) + "; what it needs is not counted")
    for register, instruction in use.misaligned:
        found.errors.append(code.misaligned(register, instruction))
    check_registers(kernel, target, found)
    if descriptor.wave32:
        found.errors.append("the descriptor asks for wave32; 64 lanes are accepted")
    if descriptor.tg_split:
        found.errors.append("the descriptor sets TG_SPLIT, which takes LDS and barriers away; 0 is accepted")
    if descriptor.user_sgprs < descriptor.enabled_user_sgprs:
        found.errors.append(f"the descriptor's user SGPR count is {descriptor.user_sgprs}, its properties "
                            f"enable {descriptor.enabled_user_sgprs}")
    for name in descriptor.reserved:
        found.errors.append(f"the descriptor's {name} is not 0")
    if descriptor.group_segment_fixed_size > target.lds_bytes:
        found.errors.append(f"{descriptor.group_segment_fixed_size} bytes of LDS; at most "
                            f"{target.lds_bytes} are accepted")
    if use.scratch and not descriptor.private_segment:
        found.errors.append(f"'{use.scratch}' accesses scratch, which the descriptor does not enable")
    if descriptor.private_segment_fixed_size and not descriptor.private_segment:
        found.errors.append(f"private_segment_fixed_size is {descriptor.private_segment_fixed_size}, but "
                            "scratch is not enabled")
    found.errors += metadata.contradictions(kernel.metadata, descriptor, target)
    found.warnings += metadata.doubts(kernel.metadata, descriptor, target)
    if kernel.metadata.get(".agpr_count", use.a) < use.a:
        found.errors.append(f"the metadata's .agpr_count is {kernel.metadata['.agpr_count']}, the code "
                            f"uses {use.a}")
    if not found.errors and not target.workgroups(
            descriptor.vgprs, descriptor.sgprs, descriptor.group_segment_fixed_size, kernel.threads):
        found.errors.append(f"a workgroup of {kernel.threads} threads, the metadata's largest, does not "
                            f"fit with {descriptor.vgprs} VGPRs")
    return found


def check(code_object):
    return [check_kernel(kernel, code_object.target) for kernel in code_object.kernels]

"""What a code object's kernels take, and what that leaves room for."""
from . import metadata


def kernel_report(kernel, target):
    descriptor, use = kernel.descriptor, kernel.use
    lds = descriptor.group_segment_fixed_size
    room = descriptor.vgprs, descriptor.sgprs, lds, kernel.threads
    return {
        "name": kernel.name,
        "workgroup": kernel.threads,
        "vgprs": {"arch": use.v, "agprs": use.a, "needed": use.vgprs,
                  "accum_offset": descriptor.accum_offset, "allocated": descriptor.vgprs},
        "sgprs": {"code": use.s, "needed": kernel.sgprs(target), "allocated": descriptor.sgprs},
        "lds_bytes": lds,
        "scratch_bytes": descriptor.private_segment_fixed_size,
        "waves_per_simd": {"by_vgprs": target.waves_by_vgprs(descriptor.vgprs),
                           "by_sgprs": target.waves_by_sgprs(descriptor.sgprs),
                           "of_workgroups": target.waves_per_simd(*room)},
        "workgroups_per_cu": target.workgroups(*room),
        "user_sgprs": descriptor.user_sgprs,
        "workgroup_ids": descriptor.workgroup_ids,
        "workitem_ids": "xyz"[:descriptor.workitem_id + 1],
        "kernarg_bytes": descriptor.kernarg_size,
        "kernarg": [{"name": metadata.argument_name(kernel.metadata, i), "offset": a[".offset"],
                     "size": a[".size"], "kind": a[".value_kind"]}
                    for i, a in enumerate(kernel.metadata[".args"])],
    }


def report(code_object):
    return {"file": code_object.name, "target": code_object.target.name,
            "kernels": [kernel_report(kernel, code_object.target) for kernel in code_object.kernels]}


def text(made):
    lines = []
    for kernel in made["kernels"]:
        vgprs, sgprs, waves = kernel["vgprs"], kernel["sgprs"], kernel["waves_per_simd"]
        lines += [
            f"{kernel['name']}, {made['target']}, workgroup of {kernel['workgroup']}",
            f"  VGPRs    {vgprs['arch']} arch, {vgprs['agprs']} acc, accum_offset "
            f"{vgprs['accum_offset']}; {vgprs['needed']} needed, {vgprs['allocated']} allocated",
            f"  SGPRs    {sgprs['needed']} needed, {sgprs['allocated']} allocated",
            f"  LDS      {kernel['lds_bytes']} bytes",
            f"  scratch  {kernel['scratch_bytes']} bytes",
            f"  waves    per SIMD: {waves['by_vgprs']} by VGPRs, {waves['by_sgprs']} by SGPRs; "
            f"{waves['of_workgroups']} with {kernel['workgroups_per_cu']} workgroups on a compute unit",
            f"  entry    {kernel['user_sgprs']} user SGPRs, then workgroup ids "
            f"{kernel['workgroup_ids'] or 'none'}; work-item ids {kernel['workitem_ids']}",
            f"  kernarg  {kernel['kernarg_bytes']} bytes"]
        lines += [f"    {a['offset']:5} {a['size']:5}  {a['name']}  {a['kind']}" for a in kernel["kernarg"]]
    return "\n".join(lines)

"""The 64-byte kernel descriptor, read."""
import struct
from dataclasses import dataclass

SIZE = 64


def bits(word, low, count=1):
    return word >> low & (1 << count) - 1


@dataclass(frozen=True)
class Descriptor:
    group_segment_fixed_size: int
    private_segment_fixed_size: int
    kernarg_size: int  # 0: not said
    entry_offset: int  # from the descriptor
    accum_offset: int
    vgprs: int  # allocated
    sgprs: int  # allocated
    user_sgprs: int
    workgroup_ids: str  # such as "xyz"
    workitem_id: int
    private_segment: bool
    tg_split: bool
    wave32: bool
    kernarg_ptr: bool
    enabled_user_sgprs: int  # those that the code properties and kernarg preload ask for
    reserved: tuple  # names of what must be 0 and is not

    @property
    def initial_sgprs(self):
        """What the hardware writes at entry."""
        return self.user_sgprs + len(self.workgroup_ids)



def read(data):
    lds, private, kernarg, zero, entry = struct.unpack_from("<IIIIq", data, 0)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", data, 44)
    properties, preload = struct.unpack_from("<HH", data, 56)
    # dispatch_ptr, queue_ptr, kernarg_segment_ptr, dispatch_id, private_segment_size
    enabled = sum(size for bit, size in [(1, 2), (2, 2), (3, 2), (4, 2), (6, 1)] if bits(properties, bit))
    must_be_zero = {
        "bytes 12 to 15": zero,
        "bytes 24 to 43": any(data[24:44]),
        "bytes 60 to 63": any(data[60:64]),
        "GRANULATED_LDS_SIZE": bits(rsrc2, 15, 9),
        "PRIORITY": bits(rsrc1, 10, 2),
        "PRIV": bits(rsrc1, 20),
        "private_segment_buffer": bits(properties, 0),
        "flat_scratch_init": bits(properties, 5),
    }
    return Descriptor(
        group_segment_fixed_size=lds, private_segment_fixed_size=private, kernarg_size=kernarg,
        entry_offset=entry,
        accum_offset=4 * (bits(rsrc3, 0, 6) + 1),
        vgprs=8 * (bits(rsrc1, 0, 6) + 1),
        sgprs=16 * (bits(rsrc1, 6, 4) // 2 + 1),
        user_sgprs=bits(rsrc2, 1, 5),
        workgroup_ids="".join(axis for i, axis in enumerate("xyz") if bits(rsrc2, 7 + i)),
        workitem_id=bits(rsrc2, 11, 2),
        private_segment=bool(bits(rsrc2, 0)), tg_split=bool(bits(rsrc3, 16)),
        wave32=bool(bits(properties, 10)), kernarg_ptr=bool(bits(properties, 3)),
        enabled_user_sgprs=enabled + bits(preload, 0, 7),
        reserved=tuple(name for name, value in must_be_zero.items() if value))

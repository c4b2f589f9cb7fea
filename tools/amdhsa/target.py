"""What a processor has, and how many waves that gives room for."""
from dataclasses import dataclass

from .failure import Failure

WAVE = 64
MAX_WORKGROUP = 1024
ENTRY_ALIGNMENT = 256  # of a kernel's first instruction


def align(value, unit):
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Target:
    name: str
    elf_machine: int  # the low byte of e_flags
    lds_bytes: int  # of a compute unit, all of it usable by one workgroup
    lds_granule: int = 512
    simds: int = 4
    max_waves: int = 8  # of a SIMD
    vgprs: int = 512  # of a SIMD lane, arch VGPRs and AGPRs together
    max_arch_vgprs: int = 256
    max_agprs: int = 256
    vgpr_granule: int = 8
    sgprs: int = 800  # of a SIMD
    max_sgprs: int = 102
    sgpr_granule: int = 16
    # VCC, FLAT_SCRATCH and the XNACK mask lie behind the last SGPR. All are always reserved where
    # FLAT_SCRATCH is set up by the hardware.
    extra_sgprs: int = 6

    def allocated_vgprs(self, count):
        return max(align(count, self.vgpr_granule), self.vgpr_granule)

    def allocated_sgprs(self, count):
        return max(align(count, self.sgpr_granule), self.sgpr_granule)

    def waves_by_vgprs(self, allocated):
        return min(self.max_waves, self.vgprs // allocated)

    def waves_by_sgprs(self, allocated):
        return min(self.max_waves, self.sgprs // allocated)

    def workgroups(self, vgprs, sgprs, lds, workgroup):
        """Workgroups of `workgroup` threads that a compute unit holds at once; 0: not even one."""
        waves = min(self.waves_by_vgprs(vgprs), self.waves_by_sgprs(sgprs)) * self.simds
        count = waves // (align(workgroup, WAVE) // WAVE)
        return min(count, self.lds_bytes // align(lds, self.lds_granule)) if lds else count

    def waves_per_simd(self, vgprs, sgprs, lds, workgroup):
        waves = self.workgroups(vgprs, sgprs, lds, workgroup) * (align(workgroup, WAVE) // WAVE)
        return align(waves, self.simds) // self.simds


TARGETS = {target.name: target for target in [
    Target("gfx942", elf_machine=0x4C, lds_bytes=65536),
    Target("gfx950", elf_machine=0x4F, lds_bytes=163840, lds_granule=1280)]}


def find_target(name):
    if name not in TARGETS:
        raise Failure(f"-mcpu: '{name}' is not one of {', '.join(TARGETS)}")
    return TARGETS[name]

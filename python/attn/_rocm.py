import ctypes
import importlib.util
from pathlib import Path


def open_wheel():
    """Opens the HIP library of AMD's Python packages, so that libattn finds it; False if there is none."""
    try:
        package = importlib.util.find_spec("_rocm_sdk_core")
    except (ImportError, ValueError):
        return False
    for folder in (package.submodule_search_locations or []) if package else []:
        for name in ("libamdhip64.so.7", "libamdhip64.so.6"):
            file = Path(folder) / "lib" / name
            if file.exists():
                try:
                    ctypes.CDLL(str(file))
                except OSError:
                    continue
                return True
    return False

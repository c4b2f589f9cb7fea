"""The same functions under the module's name of version 2."""
from . import *  # noqa: F403

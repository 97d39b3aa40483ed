"""
Modules of the user, as `--module` names them: found and imported; their mistakes are reported with file and line.

Modules are named on the command line, never by data that came in. What a module brings is registered by its decorators
while it is imported; the caller looks into its own registry afterwards.
"""

import importlib
import os
import sys
import sysconfig
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from reefknot.errors import ConfigurationError

_LIBRARIES = (str(Path(__file__).parents[1]), *(sysconfig.get_path(one) for one in ("stdlib", "purelib", "platlib")))
"""Folders whose code is not the user's."""


def import_user_module(name: str, *, path: str | None = None) -> ModuleType:
    """
    Import a module by its name (`pkg.steps`) or its file (`steps.py`, `./steps.py`, `pkg/steps.py`).

    `path` is the folder in which it is looked for, before all others. Whatever goes wrong is a `ConfigurationError`.
    """
    module, file = name, None
    if name.endswith(".py") or os.sep in name:
        file, folder = _module_file(name, Path(path or "."))
        module = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        path = str(folder)
    if path is not None and path not in sys.path:
        sys.path.insert(0, path)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a module does when it is imported
        raise ConfigurationError([f"--module {name}: {_import_failure(error, module)}"]) from error
    if file is not None and not _is_file(found, file):
        taken = getattr(found, "__file__", None) or "a module that is built in"
        text = f"the name {module} is taken by {taken}; give the file another name"
        raise ConfigurationError([f"--module {name}: {text}"])
    return found


def _module_file(name: str, beside: Path) -> tuple[Path, Path]:
    """The file of a module, and the folder from which its name is made: `pkg/steps.py` is `pkg.steps`."""
    file = Path(os.path.normpath(beside / name))
    if not file.is_file():
        what = "is a folder; name a file in it, or the module" if file.is_dir() else "there is no such file"
        raise ConfigurationError([f"--module {name}: {what}; accepted: a file such as steps.py, or a name: pkg.steps"])
    folder = Path(os.path.normpath(beside))
    return file, folder if file.is_relative_to(folder) else file.parent


def _is_file(module: ModuleType, file: Path) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and os.path.exists(found) and os.path.samefile(found, file)


def _import_failure(error: Exception, module: str) -> str:
    """The sentence for a module that cannot be imported: file and line of the user's code, and the error."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"there is no module {error.name} here; accepted: a name such as pkg.steps, or a file: steps.py"
    if isinstance(error, SyntaxError) and error.filename:
        return f"cannot be imported: {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(("<frozen", *_LIBRARIES))]
    where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    return f"cannot be imported: {where}{type(error).__name__}: {error}"

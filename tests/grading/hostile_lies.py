"""Submissions that look where they must not, or lie to who grades them; in the sandbox alone."""

from __future__ import annotations

from tests.grading.hostile import STOPPED, Hostile, wrong

TRY = """
def tried(name, act):
    try:
        print("REA" + "CHED", name, act())
    except BaseException as problem:
        print("refused:", name, type(problem).__name__)
"""

SPIES = {
    "reads what is not its own": Hostile(
        points=5,
        extra=TRY + "import os, pathlib\nfor spot in @SPOTS@:\n"
        "    tried(spot, lambda: pathlib.Path(spot).read_text(errors='replace')\n"
        "          if not os.path.isdir(spot) else os.listdir(spot))",
        page=("refused: ", "FileNotFoundError"),
        flags=("uses pathlib",),
    ),
    "looks for secrets everywhere": Hostile(
        points=5,
        extra="""
import os
looked = 0
for top in ("/proc", "/home", "/tmp", "/dev/shm", "/run", "/var", "/etc", "/root", "/work", "/opt"):
    for here, folders, files in os.walk(top):
        folders[:] = folders if here.count("/") < 6 else []
        for name in files:
            fd = -1
            try:
                fd = os.open(os.path.join(here, name), os.O_RDONLY | os.O_NONBLOCK)
                text = os.read(fd, 1 << 16).decode("latin-1")
            except OSError:
                continue
            finally:
                if fd >= 0:
                    os.close(fd)
            looked += 1
            start = text.find("secret-" + "of-")
            if start >= 0:
                print("REA" + "CHED", here, name, text[start : start + 80])
for name, value in os.environ.items():
    print(name, value)
print("looked", "at", looked > 20)
""",
        page=("looked at True",),
        flags=("uses os",),
    ),
    "other processes": Hostile(
        points=5,
        extra="import os\nseen = [int(p) for p in os.listdir('/proc') if p.isdigit()]\n"
        "print('few', len(seen) < 9, max(seen) < 99999)\n"
        "print([open(f'/proc/{p}/cmdline').read() for p in seen])",
        page=("few True",),
    ),
    "network": Hostile(
        points=5,
        extra=TRY + "import socket\n"
        "tried('tcp', lambda: socket.create_connection(('127.0.0.1', @PORT@), 2).recv(99))\n"
        "tried('out', lambda: socket.create_connection(('192.0.2.1', 80), 2))\n"
        "def abstract():\n    one = socket.socket(socket.AF_UNIX)\n    one.connect(@SOCKET@)\n"
        "    return one.recv(99)\ntried('unix', abstract)\n"
        "udp = socket.socket(type=socket.SOCK_DGRAM)\n"
        "tried('udp', lambda: udp.sendto(b'out', ('192.0.2.1', 53)))\n"
        "tried('name', lambda: socket.getaddrinfo('example.org', 80))",
        page=tuple(f"refused: {one}" for one in ("tcp", "out", "unix", "udp", "name")),
        flags=("uses socket",),
    ),
    "writes where it may not": Hostile(
        points=5,
        extra=TRY + "import pathlib\n"
        "for spot in (*@SPOTS@, '@LABCORE@', '/usr/bin', '/etc', '/'):\n"
        "    tried(spot, lambda: pathlib.Path(spot, '@MARK@').write_text('@MARK@'))\n"
        "tried('core', lambda: pathlib.Path('@LABCORE@/exercises/core.py').write_text('@MARK@'))",
        page=("refused: core OSError", "refused: / "),
    ),
    "ptrace": Hostile(
        points=5,
        extra=TRY + "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def mounted():\n    if libc.mount(b'none', b'/tmp', b'tmpfs', 0, b''):\n"
        "        raise OSError(ctypes.get_errno())\n"
        "def unshared():\n    if libc.unshare(0x10000000):\n"
        "        raise OSError(ctypes.get_errno())\n"
        "def another():\n    os.setuid(0)\n"
        "tried('mount', mounted)\ntried('setuid', another)\n"
        "libc.ptrace(0x4206, os.getppid(), 0, 0)  # PTRACE_SEIZE",
        page=("refused: mount", "refused: setuid"),
        flags=("uses ctypes",),
    ),
}

LIES = {
    "patches the check": Hostile(
        points=2,
        square="import labcore.exercises.core as core\n"
        "core.Outcome.require = lambda self: None\n"
        "core.Exercise.check = core.Exercise.judge = lambda *_, **__: True\n" + wrong("return 7"),
        page=("hidden square",),
        flags=("import labcore.exercises.core",),
    ),
    "patches builtins and numpy": Hostile(
        points=2,
        square="import builtins, numpy\nbuiltins.AssertionError = KeyError\n"
        "numpy.allclose = numpy.array_equal = lambda *_: True\n" + wrong("return 7"),
        page=("hidden square",),
        flags=("uses builtins",),
    ),
    "patches the kernel": Hostile(
        points=2,
        square="from IPython import get_ipython\nshell = get_ipython()\n"
        "shell.showtraceback = shell.ask_exit = lambda *_, **__: None\n"
        "shell.display_pub.publish = lambda *_, **__: None\n" + wrong("return 7"),
        page=("hidden square",),
    ),
    "catches what the check raises": Hostile(
        points=2,
        square=wrong("return 7") + "import sys\nsys.excepthook = lambda *_: None\n"
        "get_ipython().set_custom_exc((BaseException,), lambda *_, **__: None)",
        page=("hidden square",),
    ),
    "traces everything": Hostile(
        points=2,
        square="import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\n"
        + wrong("import sys\nsys._getframe(1).f_locals['answers'] = [9]\nreturn 7"),
        page=("hidden square",),
        flags=("uses sys",),
    ),
    "an answer equal to everything": Hostile(
        points=2,
        square="class Any:\n    def __eq__(self, other):\n        return True\n"
        "    __hash__ = None\n" + wrong("return Any()"),
        page=("got Any",),
    ),
    "a number equal to everything": Hostile(
        points=2,
        square="class Any(int):\n    def __eq__(self, other):\n        return True\n"
        + wrong("return Any(7)"),
        page=("got Any",),
    ),
    "an array that lies": Hostile(
        points=2,
        square="import numpy\nclass Any(numpy.ndarray):\n"
        "    def __eq__(self, other):\n        return numpy.True_\n"
        "    shape = property(lambda self: (3,))\n" + wrong("return numpy.array(7).view(Any)"),
        page=("got Any",),
    ),
    "a tensor that agrees with everything": Hostile(
        points=2,
        square="import torch\nclass Any(torch.Tensor):\n"
        "    __torch_function__ = classmethod(lambda *_: torch.tensor(True))\n"
        + wrong("return torch.tensor(7).as_subclass(Any)"),
        page=("got Any",),
    ),
    "text equal to every name": Hostile(
        points=2,
        square="class Any(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\n"
        + wrong("return Any('x')"),
        page=("got Any",),
    ),
    "the reference among all objects": Hostile(
        points=2,
        square=wrong(
            "import gc\nfrom labcore.exercises import Exercise\n"
            "for one in gc.get_objects():\n"
            "    if isinstance(one, Exercise) and 'square' in one.id:\n"
            "        return one.reference(x)\nreturn 7"
        ),
        page=("hidden square",),
        flags=("uses gc",),
    ),
    "an answer that runs when it is unpickled": Hostile(
        guarded=True,
        points=2,
        square="import os\nclass Runs:\n    def __reduce__(self):\n"
        "        return os.system, ('echo @MARK@ > /tmp/@MARK@',)\n" + wrong("return Runs()"),
        page=("got Runs",),
    ),
    "garbage into every descriptor": Hostile(
        guarded=True,
        points=2,
        square="import os\n"
        + wrong(
            "for fd in range(3, 64):\n    try:\n        os.write(fd, b'\\xff' * 4000)\n"
            "    except OSError:\n        pass\nreturn 7"
        ),
        flags=("uses os",),
    ),
    "frames of its own": Hostile(
        guarded=True,
        points=0,
        square="""
import ctypes, json, os, numpy
from labcore.processes import wire
def told(value):
    return numpy.frombuffer(json.dumps(value).encode(), numpy.uint8)
odd = {"output_type": "odd", "data": 3}
said = {name: {"value": 9, "parameters": [[1]]} for name in ("double", "square")}
outputs = told([[[odd]] * 7, [None] * 7])
frame = wire.pack({"problem": "", "outputs": outputs, "told": told(said), "packed": {}})
libc, parent = ctypes.CDLL(None), os.getppid()
handle = libc.syscall(434, parent, 0)  # pidfd_open, and pidfd_getfd
for fd in os.listdir(f"/proc/{parent}/fd"):
    if os.readlink(f"/proc/{parent}/fd/{fd}").startswith("pipe"):
        try:
            os.write(libc.syscall(438, handle, int(fd), 0), frame)
        except OSError:
            pass
""",
        page=("An invalid output",),
        flags=("uses os", "uses ctypes"),
    ),
    "hands in the export itself": Hostile(
        points=2,
        also=(STOPPED,),  # the import alone may take a busy machine too long
        square="import labcore.grading.session as session, json, pathlib\n"
        "def export(names, folder):\n"
        "    told = {'parameters': [['x', 'POSITIONAL_OR_KEYWORD', False]]}\n"
        "    told = {'double': told, 'square': {'value': [9]}}\n"
        "    pathlib.Path(folder, 'handed_in.json').write_text(json.dumps(told))\n"
        "    from labcore.processes.travel import dumps\n"
        "    pathlib.Path(folder, 'double').write_bytes(dumps(get_ipython().user_ns['double']))\n"
        "session.export = export",
        flags=("uses pathlib",),
    ),
    "HTML in what it shows and raises": Hostile(
        points=2,
        square=wrong("raise ValueError('<script>alert(1)</script><img src=x onerror=alert(2)>')"),
        extra="from IPython.display import HTML, Javascript, display\n"
        "display(HTML('<b>kept</b><script>alert(3)</script><iframe src=\"https://evil.example\">'))\n"
        "display(Javascript('alert(4)'))\nprint('<script>alert(5)</script>')",
        page=("<b>kept</b>", "&lt;script&gt;alert(5)"),
    ),
    "signs that no text has": Hostile(
        points=2,
        square=wrong("raise ValueError('\\ud800 \\0 \\u202e')"),
        extra="print('bidi \\u202e and \\0')\nprint('\\ud8' '00')\nprint('s\\udcff')",
        page=("raised ValueError",),
    ),
}

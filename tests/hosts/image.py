"""What stands in on these hosts for a machine image and its package sources.

All that is not the real thing:

- `ubuntu` is another name of root (namespaces.py), since Python may be below root's home.
- `sudo`, `cloud-init` and `apt-get` are scripts: without a network there are no packages to install.
- `~/ridgeline/.venv` is there already, so `make setup` finds nothing to do. It has this environment's packages, and the
  code that the launcher has copied to the host.
- EC2, IAM and the metadata of instances are moto's (ec2.py), at AWS_ENDPOINT_URL and at their true address. The
  launcher's `aws` is a script (operators_shell.py).
- GPUs are numbers, and engines run on CPU: `conftest.write_served_file` takes the place of deploy/cluster-serve.yaml.
- The quarter of an hour after which an idle node ends is shortened on the head (test_ray_up.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

APT_LOG = "apt.log"
"""Below a host's home: what it was told to install."""
FAILS = "apt-fails"
"""Below a host's home: if it is there, `apt-get` fails as without a way to the archive."""
PROGRAMS = {
    "sudo": '#!/bin/sh\nexec "$@"\n',
    "cloud-init": "#!/bin/sh\necho status: done\n",
    "apt-get": f"""#!/bin/sh
[ ! -e ~/{FAILS} ] || {{ echo 'E: Unable to fetch some archives' >&2; exit 100; }}
echo "$@" >> ~/{APT_LOG}
""",
}


def make_environment(folder: Path, home: Path) -> None:
    """Write an environment that hosts have as ~/ridgeline/.venv: this one's packages, and the host's own code."""
    ours = Path(sys.prefix)
    packages = next(ours.glob("lib/python3*/site-packages"))
    theirs = folder / packages.relative_to(ours)
    (folder / "bin").mkdir(parents=True)
    theirs.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text((ours / "pyvenv.cfg").read_text())
    (theirs / "ridgeline.pth").write_text(f"{home}/ridgeline/src\n{packages}\n")
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(os.path.realpath(ours / "bin/python"))
    for name in ("pip", "ray", "ridgeline"):
        _, _, script = (ours / "bin" / name).read_text().partition("\n")
        program = folder / "bin" / name
        program.write_text(f"#!{home}/ridgeline/.venv/bin/python\n{script}")
        program.chmod(0o755)
    (folder / ".ready-cpu").touch()

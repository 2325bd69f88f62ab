"""The packages of the environment lm-eval, as lines of a requirements file: lm-eval, and what its tasks need and
Footplate does not have. One hash for each wheel of Linux (x86-64, Arm) and macOS, Python 3.11 to 3.14.
"""

LM_EVAL_PACKAGES = tuple(
    f"{package} {' '.join(f'--hash=sha256:{digest}' for digest in digests)}"
    for package, digests in {
        "lm-eval==0.4.13": ("5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a",),
        "more-itertools==11.2.1": ("35a7377edd1dd6608dcb2cdf534ded55ea32d49448875ad042cd3f879fb1ded0",),
        "narwhals==2.29.0": ("1c69b3dc30240f6e848c5a673cafc86affa44184ecce721e25b7194663ad10dc",),
        "scikit-learn==1.9.1": (
            "326c188f92084bf58664229f4578eeab6176313b37cd5dfc85abd92b94130c58",
            "b48b2b5b41d9c5fbafef5f37b042f61110df3318ad2a45baf57287ea5b9ba5a2",
            "4298fcc01b3d8fa9768d36894e99cce0747b3b2dd73bfd80779e393769d0afab",
            "52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df",
            "0c0f8b5d09b44101cea2767f300680bada1ea27f976fe4b48b83950a4f55a49a",
            "8c14ce41d561f7749f990b41d6703fe02c4669fbc485e598e069e0a1967b488e",
            "e4c20a6c017d820faa7ac8c783e3d0c6a9a2e297bf9f55332ca17cdf7fd4d04d",
            "e5d7b18a5b9dca241a74695f3275fa4c895a9dadc72b3d8df5fa9d1083c9b83e",
            "2c2b312fd8c02951a364fa120ea08c1cec10d863466bf1701b013152d7537835",
            "61cd968ab831a76d0ecbaf0347ab2270268716da28f94fd022497e3d6f205f13",
            "5990f9c69e431bfaddcde1a6d7c5355243e026bc9b9e560c13893b90dab53fb4",
            "55e79d6e9b0923f1a978179822bd43d7f5543f45e970a00fe861f43486380aba",
            "d5d117952769b563067656784e03c75a2d8235a7a05cf7fffa78a311e75aac08",
            "8893bc6331f60f18d4ac75e12ed356e2dcf6a564bf767918b5b7ca54c8c8be49",
            "b5492cf2df5226691c32611de8734bcf42148c6547ae53c7f4e6b847793addc0",
            "993d332ff80e62efae9e39603b7e872297c418d780f01a01855269a3489c950f",
        ),
        "scipy==1.17.1": (
            "1f95b894f13729334fb990162e911c9e5dc1ab390c58aa6cbecb389c5b5e28ec",
            "e18f12c6b0bc5a592ed23d3f7b891f68fd7f8241d69b7883769eb5d5dfb52696",
            "a3472cfbca0a54177d0faa68f697d8ba4c80bbdc19908c3465556d9f7efce9ee",
            "766e0dc5a616d026a3a1cffa379af959671729083882f50307e18175797b3dfd",
            "744b2bf3640d907b79f3fd7874efe432d1cf171ee721243e350f55234b4cec4c",
            "43af8d1f3bea642559019edfe64e9b11192a8978efbd1539d7bc2aaa23d92de4",
            "35c3a56d2ef83efc372eaec584314bd0ef2e2f0d2adb21c55e6ad5b344c0dcb8",
            "fcb310ddb270a06114bb64bbe53c94926b943f5b7f0842194d585c65eb4edd76",
            "cc90d2e9c7e5c7f1a482c9875007c095c3194b1cfedca3c2f3291cdc2bc7c086",
            "c80be5ede8f3f8eded4eff73cc99a25c388ce98e555b17d31da05287015ffa5b",
            "e19ebea31758fac5893a2ac360fedd00116cbb7628e650842a6691ba7ca28a21",
            "02ae3b274fde71c5e92ac4d54bc06c42d80e399fec704383dcd99b301df37458",
            "5e3c5c011904115f88a39308379c17f91546f77c1667cea98739fe0fccea804c",
            "6fac755ca3d2c3edcb22f479fceaa241704111414831ddd3bc6056e18516892f",
            "7ff200bf9d24f2e4d5dc6ee8c3ac64d739d3a89e2326ba68aaf6c4a2b838fd7d",
            "4b400bdc6f79fa02a4d86640310dde87a21fba0c979efff5248908c6f15fad1b",
            "2b64ca7d4aee0102a97f3ba22124052b4bd2152522355073580bf4845e2550b6",
            "581b2264fc0aa555f3f435a5944da7504ea3a065d7029ad60e7c3d1ae09c5464",
            "a48a72c77a310327f6a3a920092fa2b8fd03d7deaa60f093038f22d98e096717",
            "45abad819184f07240d8a696117a7aacd39787af9e0b719d00285549ed19a1e9",
            "3fd1fcdab3ea951b610dc4cef356d416d5802991e7e32b5254828d342f7b7e0b",
            "7bdf2da170b67fdf10bca777614b1c7d96ae3ca5794fd9587dce41eb2966e866",
            "adb2642e060a6549c343603a3851ba76ef0b74cc8c079a9a58121c7ec9fe2350",
            "eee2cfda04c00a857206a4330f0c5e3e56535494e30ca445eb19ec624ae75118",
        ),
        "threadpoolctl==3.8.0": ("f1b49c82704d50f13ffae019c727b0fa4f6791a58f48f06a09c45face1be66da",),
    }.items()
)

#pragma once
// Stands in for torch's own header, without torch::nn, optimizers and data loaders, which no operator of DeepSpeed uses.
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>

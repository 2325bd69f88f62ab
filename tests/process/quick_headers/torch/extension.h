#pragma once
// Stands in for torch's own header, with what the operators of DeepSpeed use: tensors, and, unless a file needs nothing
// else, the registration of operators and tensors as arguments from Python.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/ATen.h>
#ifndef ONLY_TENSORS
#include <torch/library.h>
#include <torch/csrc/utils/pybind.h>
#endif
namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}

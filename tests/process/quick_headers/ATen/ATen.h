#pragma once
// Stands in for torch's own header, without the two thousand functions of which the operators of DeepSpeed use a few.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include "merge.h"

#include <algorithm>
#include <array>

#include "check.h"
#include "device.h"
#include "fp8cutlass/merge/params.h"
#include "kernels.h"
#include "start.h"
#include "tensors.h"

namespace fp8cutlass {

namespace {

using merging::kColumns;

void require_rows(const View& x, const char* name, const View& out) {
  require(x.dim() == 4 && x.is_cuda() && x.device() == out.device(), name, " must have 4 dimensions, on out's card");
  require_shape(x, name, {out.size(0), out.size(1), out.size(2), out.size(3)});
  bool fits = x.stride(3) == 1 && x.size(3) % kColumns == 0;
  for (int i = 0; i < 3; ++i) fits = fits && (x.size(i) == 1 || x.stride(i) % kColumns == 0);
  fits = fits && reinterpret_cast<uintptr_t>(x.data()) % (kColumns * x.element_size()) == 0;
  require(fits, name, " must have contiguous rows whose length, steps and address are multiples of 4 elements");
}

void require_lse(const View& x, const char* name, const View& out) {
  require(x.dim() == 3 && x.scalar_type() == ScalarType::Float && x.is_cuda() && x.device() == out.device(), name,
          " must be float32 with 3 dimensions, on out's card");
  require_shape(x, name, {out.size(0), out.size(1), out.size(2)});
}

}  // namespace

void merge(const torch::stable::Tensor& given_out, const torch::stable::Tensor& given_lse,
           const torch::stable::Tensor& given_to, const torch::stable::Tensor& given_to_lse) {
  const View out(given_out), lse(given_lse), to(given_to), to_lse(given_to_lse);
  require(out.scalar_type() == ScalarType::Float, "out must be float32");
  require_rows(out, "out", out), require_rows(to, "to", out);
  require_lse(lse, "lse", out), require_lse(to_lse, "to_lse", out);
  merging::MergeParams p{};
  switch (to.scalar_type()) {
    case ScalarType::Float:
      p.kind = merging::Partial::f32;
      break;
    case ScalarType::BFloat16:
      p.kind = merging::Partial::bf16;
      break;
    case ScalarType::Half:
      p.kind = merging::Partial::fp16;
      break;
    default:
      fail("to must be float32, bf16 or fp16");
  }
  p.rows = to_int(out.size(0) * out.size(1) * out.size(2), "the number of rows");
  p.columns = to_int(out.size(3), "the columns of out");
  if (p.rows == 0 || p.columns == 0) return;
  // Rows that lie beside one another in `out` are numbered one after the other.
  std::array<int, 3> order{0, 1, 2};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return out.stride(a) > out.stride(b); });
  const auto step = [](const View& x, int dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; };
  for (int i = 0; i < 3; ++i) {
    const int dim = order[i];
    if (i > 0) p.size[i - 1] = to_int(out.size(dim), "a size of out");
    p.out_stride[i] = step(out, dim), p.lse_stride[i] = step(lse, dim);
    p.to_stride[i] = step(to, dim), p.to_lse_stride[i] = step(to_lse, dim);
  }
  p.out = static_cast<float*>(out.data()), p.lse = static_cast<float*>(lse.data());
  p.to = to.data(), p.to_lse = static_cast<const float*>(to_lse.data());
  p.lanes = 32;
  while (p.lanes > 1 && p.lanes / 2 * kColumns >= p.columns) p.lanes /= 2;
  const int64_t ctas = ceil_div(p.rows, merging::kMergeThreads / p.lanes);
  const int device = static_cast<int>(out.device());
  const DeviceGuard guard(device);
  void* arguments[] = {&p};
  check_launch(start(kernel_of(Single::merge, device), {ctas, merging::kMergeThreads, 0}, arguments,
                     current_stream(device), context_id()),
               "merge", device);
}

}  // namespace fp8cutlass

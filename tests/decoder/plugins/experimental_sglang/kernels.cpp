// SGLang's kernels, which are plain C++ but for their launch, on a CPU: a block of threads is a loop.
#include <cstdint>

#define __global__
struct Place {
  unsigned x;
};
static thread_local Place blockIdx, threadIdx;

#include <sgl_kernel/speculative/eagle.cuh>
#include <sgl_kernel/speculative/ngram.cuh>

namespace spec = sglang::speculative;

extern "C" void reconstruct(
    bool* mask, int64_t* lengths, int64_t* positions, int64_t* indices, int64_t* next_token,
    int64_t* next_sibling, int batch, int width) {
  for (blockIdx.x = 0; int(blockIdx.x) < batch; ++blockIdx.x)
    for (threadIdx.x = 0; int(threadIdx.x) < width; ++threadIdx.x)
      spec::reconstructIndicesFromTreeMask(
          mask, lengths, positions, indices, next_token, next_sibling, batch, width);
}

extern "C" void verify(
    int32_t* predicts, int32_t* accepted, int32_t* num_accepted, int64_t* candidates,
    int64_t* indices, int64_t* next_token, int64_t* next_sibling, int64_t* target, int batch,
    int width) {
  for (blockIdx.x = 0; int(blockIdx.x) < batch; ++blockIdx.x)
    spec::VerifyTreeGreedy<int32_t, int64_t>(
        predicts, accepted, num_accepted, candidates, indices, next_token, next_sibling, target,
        batch, width, width);
}

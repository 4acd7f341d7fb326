// C functions for vision towers, one operation per call, in bfloat16. The structs of the headers are
// mirrored in tower_kernels.py.
#include <mutex>

#include "product.h"
#include "segments.h"

namespace pagemill {

// The team of all towers of a process. Calls may come from several threads.
struct Workshop {
  std::mutex mutex;
  Team team;

  explicit Workshop(int num_threads) : team(num_threads) {}

  void run(int num_phases, const std::function<void(Member)>& work) {
    const std::lock_guard lock(mutex);
    team.run(num_phases, work);
    team.settle();
  }
};

}  // namespace pagemill

using pagemill::BF16;
using pagemill::Workshop;

extern "C" {

void* pagemill_workshop(int num_threads) { return new Workshop(num_threads); }

void pagemill_attend(void* workshop, const pagemill::Segments* segments) {
#ifdef __AVX512BF16__
  auto* shop = static_cast<Workshop*>(workshop);
  pagemill::SegmentAttention<BF16> attention(*segments, shop->team.size());
  shop->run(pagemill::kSegmentPhases, [&](pagemill::Member member) { attention.run(member); });
#endif
}

void pagemill_multiply(void* workshop, const pagemill::Product* product) {
#ifdef __AVX512BF16__
  static_cast<Workshop*>(workshop)->run(1, [&](pagemill::Member member) {
    pagemill::multiply_product<BF16>(member, *product);
  });
#endif
}
}

// C functions for one operation per call, in bfloat16: those of vision towers, and the attention of a decoder,
// which is measured alone. The structs are mirrored in tower_kernels.py.
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

// The last tokens of a sequence over its cache, in one KV head.
struct CachedAttention {
  const void* queries;  // [num_rows, head_dim]
  void *keys, *values;  // blocks of 8 tokens, as in attention.h
  const int32_t* block_table;
  void* output;  // [num_rows, head_dim]
  int32_t num_rows, seq_len, head_dim, min_tile_rows;
  float scale;
};

template <class T>
void attend_cached(const Tiles& tiles, const CachedAttention& given) {
  thread_local Scratch<T> scratch;
  const Cache<T> cache{static_cast<T*>(given.keys), static_cast<T*>(given.values),
                       {1, 1, given.head_dim, padded(given.head_dim, kPanel), kGroup}};
  const QueryRows rows{0, given.seq_len - given.num_rows, 0, 0};
  attend_item_rows(tiles, cache, static_cast<const T*>(given.queries), static_cast<T*>(given.output), given.block_table,
                   rows, given.num_rows, given.min_tile_rows, given.scale, scratch);
}

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

void pagemill_attend_cached(void* workshop, const pagemill::CachedAttention* given) {
#ifdef __AVX512BF16__
  static_cast<Workshop*>(workshop)->run(1, [&](pagemill::Member member) {
    member.each(1, [&](int) { pagemill::attend_cached<BF16>(member.tiles(), *given); });
  });
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

// C functions in bfloat16 with one operation per call: the operations of vision towers, and the attention of a
// decoder, for measurements. The structs are mirrored in tower_kernels.py.
#include <mutex>

#include "product.h"
#include "segments.h"

namespace pagemill {

// The team of all towers of a process. Calls may come from several threads.
struct SharedTeam {
  std::mutex mutex;
  Team team;

  explicit SharedTeam(int num_threads) : team(num_threads) {}

  void run(int num_phases, const std::function<void(Member)>& work) {
    const std::lock_guard lock(mutex);
    team.run(num_phases, work);
    team.settle();
  }
};

// Attention of the last tokens of a sequence over its cache, in one KV head.
struct CachedAttention {
  const void* queries;  // [num_rows, head_dim]
  void *keys, *values;  // blocks of 8 tokens, as in attention.h
  const int32_t* block_table;
  void* output;  // [num_rows, head_dim]
  int32_t num_rows, seq_len, head_dim, min_tile_rows;
  float scale;
};

template <class T>
void attend_cached(const Tiles& tiles, const CachedAttention& call) {
  thread_local Scratch<T> scratch;
  const Cache<T> cache{static_cast<T*>(call.keys), static_cast<T*>(call.values),
                       {1, 1, call.head_dim, padded(call.head_dim, kPanel), kGroup}};
  const QueryRows rows{0, call.seq_len - call.num_rows, 0, 0};
  attend_item_rows(tiles, cache, static_cast<const T*>(call.queries), static_cast<T*>(call.output), call.block_table,
                   rows, call.num_rows, call.min_tile_rows, call.scale, scratch);
}

}  // namespace pagemill

using pagemill::BF16;
using pagemill::SharedTeam;

extern "C" {

void* pagemill_shared_team(int num_threads) { return new SharedTeam(num_threads); }

void pagemill_attend(void* shared_team, const pagemill::Segments* segments) {
  auto* team = static_cast<SharedTeam*>(shared_team);
  pagemill::SegmentAttention<BF16> attention(*segments, team->team.size());
  team->run(pagemill::kSegmentPhases, [&](pagemill::Member member) { attention.run(member); });
}

void pagemill_attend_cached(void* shared_team, const pagemill::CachedAttention* call) {
  static_cast<SharedTeam*>(shared_team)->run(1, [&](pagemill::Member member) {
    member.each(1, [&](int) { pagemill::attend_cached<BF16>(member.tiles(), *call); });
  });
}

void pagemill_multiply(void* shared_team, const pagemill::Product* product) {
  static_cast<SharedTeam*>(shared_team)->run(1, [&](pagemill::Member member) {
    pagemill::multiply_product<BF16>(member, *product);
  });
}
}

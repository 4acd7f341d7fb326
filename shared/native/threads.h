// A team of threads that goes through the phases of a step together.
//
// A phase is a number of items, each of which somebody takes. It is over when its items are done, not
// when everybody has come: a member that the system has put aside keeps nobody waiting unless it has an
// item in hand, and finds the others further on. The caller is member 0, and could do all of it alone.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace pagemill {

// Longer than most waits between phases; beyond it somebody else has the processor.
constexpr int kSpins = 4000;
// Of a phase for each member: few enough to be worth taking, enough to even out.
constexpr int kItemsPerMember = 16;

inline void pause(int& spins) {
  if (++spins < kSpins) {
    _mm_pause();
  } else {
    sched_yield();
  }
}

struct alignas(64) Phase {
  std::atomic<int> next{0};
  alignas(64) std::atomic<int> done{0};
};

// One thread's way through one step.
class Member {
 public:
  Member(int index, int team_size, Phase* phases) : index_(index), team_size_(team_size), phase_(phases) {}

  int index() const { return index_; }
  int team_size() const { return team_size_; }

  // The next phase: `work(i)` once for every i below `num_items`. All members come to the same phases.
  template <class Work>
  void each(int num_items, Work&& work) {
    Phase& phase = *phase_++;
    for (int item; (item = phase.next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      work(item);
      phase.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < num_items;) pause(spins);
  }

  // The same for things of which an item has several: `work(first, stop)`.
  template <class Work>
  void ranges(int count, Work&& work) {
    const int num_items = std::min(count, kItemsPerMember * team_size_);
    each(num_items, [&](int item) {
      work(int(int64_t(count) * item / num_items), int(int64_t(count) * (item + 1) / num_items));
    });
  }

 private:
  const int index_;
  const int team_size_;
  Phase* phase_;
};

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
  }

  ~Team() {
    stopping_ = true;
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Nobody is in a step that is over: what it has used may change.
  void settle() {
    for (int spins = 0; inside_.load() != 0;) pause(spins);
  }

  // Returns when member 0 is through, and with it every phase, at most `num_phases`. `work` must live
  // until `settle` returns: somebody may still be on the way through phases that are over.
  void run(int num_phases, const std::function<void(Member)>& work) {
    settle();
    if (num_phases > num_phases_) {
      phases_ = std::make_unique<Phase[]>(num_phases);
      num_phases_ = num_phases;
    }
    for (int i = 0; i < num_phases; ++i) {
      phases_[i].next.store(0, std::memory_order_relaxed);
      phases_[i].done.store(0, std::memory_order_relaxed);
    }
    work_ = &work;
    open_.store(true);
    round_.fetch_add(1);
    round_.notify_all();
    work(Member(0, size_, phases_.get()));
    open_.store(false);
  }

 private:
  void serve(int index) {
    for (unsigned seen = 0;;) {
      round_.wait(seen);
      seen = round_.load();
      if (stopping_) return;
      // In this order: either the caller sees it inside, or it sees that the step is over.
      inside_.fetch_add(1);
      if (open_.load()) (*work_)(Member(index, size_, phases_.get()));
      inside_.fetch_sub(1);
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Phase[]> phases_;
  int num_phases_ = 0;
  const std::function<void(Member)>* work_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<bool> open_{false};
  alignas(64) std::atomic<unsigned> round_{0};
  alignas(64) std::atomic<int> inside_{0};
};

}  // namespace pagemill

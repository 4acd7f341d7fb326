// A team of threads that processes the phases of a step together.
//
// A phase is a number of items, each claimed by one member. It ends when its items are done, not when all
// members have arrived: a member that the system has descheduled delays the others only if it has claimed
// an item, and otherwise catches up. The caller is member 0, and could process all items alone.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "tiles.h"

namespace pagemill {

// Longer than most waits between phases; after that the thread yields its processor.
constexpr int kSpins = 4000;
// Items of a phase per member: few enough to keep claims cheap, and many enough to balance the load.
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

// Progress of one thread through the phases of a step.
class Member {
 public:
  Member(int index, int team_size, Phase* phases, const Tiles& tiles)
      : index_(index), team_size_(team_size), phase_(phases), tiles_(tiles) {}

  int index() const { return index_; }
  int team_size() const { return team_size_; }
  const Tiles& tiles() const { return tiles_; }

  // Runs the next phase: `work(i)` once for every i below `num_items`. All members run the same phases.
  template <class Work>
  void each(int num_items, Work&& work) {
    Phase& phase = *phase_++;
    for (int item; (item = phase.next.fetch_add(1, std::memory_order_relaxed)) < num_items;) {
      work(item);
      phase.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < num_items;) pause(spins);
  }

  // Runs the next phase over ranges: `work(first, stop)` for ranges that cover [0, count).
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
  const Tiles& tiles_;  // of this thread
};

// A thread that runs phases by itself, with the interface of a member.
class Alone {
 public:
  explicit Alone(const Tiles& tiles) : tiles_(tiles) {}

  int team_size() const { return 1; }
  const Tiles& tiles() const { return tiles_; }

  template <class Work>
  void each(int num_items, Work&& work) {
    for (int item = 0; item < num_items; ++item) work(item);
  }
  template <class Work>
  void ranges(int count, Work&& work) {
    work(0, count);
  }

 private:
  const Tiles& tiles_;
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

  // Waits until no thread is inside of a finished step, so that its inputs may change.
  void settle() {
    for (int spins = 0; inside_.load() != 0;) pause(spins);
  }

  // Runs at most `num_phases` phases; returns when all items are done. `work` must live until `settle`
  // returns: a late thread may still be walking through finished phases.
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
    walk(0, work);
    open_.store(false);
  }

 private:
  // The only place that makes members: each has the tiles of the thread that it runs on.
  void walk(int index, const std::function<void(Member)>& work) {
    const Tiles tiles;
    work(Member(index, size_, phases_.get(), tiles));
  }

  void serve(int index) {
    for (unsigned seen = 0;;) {
      round_.wait(seen);
      seen = round_.load();
      if (stopping_) return;
      // The order matters: either the caller sees this thread inside, or the thread sees the end.
      inside_.fetch_add(1);
      if (open_.load()) walk(index, *work_);
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

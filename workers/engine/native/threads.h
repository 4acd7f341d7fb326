// A fixed team of threads that runs one function at a time, all members together.
//
// The caller is member 0. Inside the function the members meet at barriers; these spin, for they
// come every few microseconds. Between functions the others sleep.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace pagemill {

// Longer than any wait between phases of a layer; beyond it somebody else has the processor.
constexpr int kSpins = 4000;

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int member = 1; member < size; ++member) threads_.emplace_back([this, member] { serve(member); });
  }

  ~Team() {
    stopping_ = true;
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  void run(const std::function<void(int)>& work) {
    work_ = &work;
    running_.store(size_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    work(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0;) pause(spins);
  }

  // Every member must come to every barrier.
  void barrier() {
    if (size_ == 1) {
      next_.store(0, std::memory_order_relaxed);
      return;
    }
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase;) pause(spins);
  }

  // The next of a phase's work items, each given out once; they count from 0 after every barrier.
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static void pause(int& spins) {
    if (++spins < kSpins) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }

  void serve(int member) {
    for (unsigned seen = 0;;) {
      round_.wait(seen, std::memory_order_acquire);
      seen = round_.load(std::memory_order_acquire);
      if (stopping_) return;
      (*work_)(member);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<unsigned> round_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  alignas(64) std::atomic<int> next_{0};
};

}  // namespace pagemill

#include "team.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr uint64_t kField = (1u << 20) - 1;
// Some 10 µs of spinning: longer than the gap between two loops of a step, far shorter than a time slice.
constexpr int kSpins = 200;
// A helper stays awake between the steps of a busy engine, and sleeps soon after the last one.
constexpr auto kAwake = std::chrono::milliseconds(3);

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

int tasks_of(uint64_t ticket) { return static_cast<int>((ticket >> 20) & kField); }
int next_of(uint64_t ticket) { return static_cast<int>(ticket & kField); }
bool open(uint64_t ticket) { return next_of(ticket) < tasks_of(ticket); }

}  // namespace

Team::Team(int threads) {
  for (int worker = 1; worker < threads; ++worker) helpers_.emplace_back([this, worker] { help(worker); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

void Team::share(int tasks, Call call, const void* body) {
  ++epoch_;
  Loop& loop = loops_[epoch_ % kLoops];
  loop.call = call;
  loop.body = body;
  loop.done.store(0, std::memory_order_relaxed);
  ticket_.store(epoch_ << 40 | static_cast<uint64_t>(tasks) << 20, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  while (work(0)) {
  }
  for (int spins = 0; loop.done.load(std::memory_order_acquire) < tasks; ++spins) {
    if (spins < kSpins) pause(); else std::this_thread::yield();
  }
}

// Take one task of the loop that runs and do it; false if there is none left.
bool Team::work(int worker) {
  if (!open(ticket_.load(std::memory_order_acquire))) return false;
  const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
  if (!open(ticket)) return false;
  // the loop can't end before this task has, so its slot isn't reused
  Loop& loop = loops_[(ticket >> 40) % kLoops];
  loop.call(loop.body, next_of(ticket), worker);
  loop.done.fetch_add(1, std::memory_order_release);
  return true;
}

void Team::help(int worker) {
  using Clock = std::chrono::steady_clock;
  auto idle_since = Clock::now();
  int spins = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (work(worker)) {
      while (work(worker)) {
      }
      idle_since = Clock::now();
      spins = 0;
    } else if (++spins < kSpins) {
      pause();
    } else if (Clock::now() - idle_since < kAwake) {
      std::this_thread::yield();
    } else {
      sleep();
      idle_since = Clock::now();
      spins = 0;
    }
  }
}

void Team::sleep() {
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [this] { return stop_.load() || open(ticket_.load(std::memory_order_seq_cst)); });
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace paceline

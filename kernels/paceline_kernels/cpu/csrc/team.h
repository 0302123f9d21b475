// A team of threads that share loops. The leader is the thread that calls; the others spin for work for a while, then sleep.
//
// A loop ends when its tasks are done, not when every thread has come by: a helper that lost its core in between delays
// nobody unless it holds a task. Waiting threads spin briefly and then yield, so that a busy machine slows a step in
// proportion (OpenMP's spinning barriers made a step ten times slower beside one other busy process).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(helpers_.size()) + 1; }

  // Run `body(task, worker)` for every task below `tasks`; worker < size() names the thread, for scratch space.
  template <class Body>
  void each(int tasks, const Body& body) {
    if (tasks <= 1 || helpers_.empty()) {
      for (int task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    share(tasks, &call<Body>, &body);
  }

 private:
  using Call = void (*)(const void* body, int task, int worker);
  struct Loop {
    Call call = nullptr;
    const void* body = nullptr;
    alignas(64) std::atomic<int> done{0};
  };

  template <class Body>
  static void call(const void* body, int task, int worker) {
    (*static_cast<const Body*>(body))(task, worker);
  }

  void share(int tasks, Call call, const void* body);
  bool work(int worker);
  void help(int worker);
  void sleep();

  static constexpr int kLoops = 4;
  Loop loops_[kLoops];
  // epoch (24 bits), tasks (20 bits), next task (20 bits): one word, so that a ticket always says which loop it is for
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  uint64_t epoch_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> helpers_;
};

}  // namespace paceline

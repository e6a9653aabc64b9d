// How far a node has come, on stderr: redrawn in place on a terminal, a line every ten per cent elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace host {

class Progress {
public:
    explicit Progress(std::string name);

    // A vvae_progress_fn with a Progress as its user pointer. Asks the run to stop once the user has.
    static int32_t tell(void *user, uint64_t done, uint64_t total, const char *stage) noexcept;

    void done();
    void stopped();

private:
    void show(int percent, const char *stage);

    std::string name_;
    bool terminal_;
    int shown_ = -1;
    std::chrono::steady_clock::time_point start_;
};

} // namespace host

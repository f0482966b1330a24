// Measures llama.cpp on request; the counterpart of worker.py. Reads one request a line, answers one JSON value a line.
//
//   open DEPTH CAPACITY          make a context and fill it with DEPTH tokens         -> seconds of the filling
//   run DEPTH ROWS CALLS HEAD    decode CALLS batches of ROWS tokens, logits of all   -> seconds per batch
//   prefill ROWS HEAD            decode ROWS tokens at depth 0, logits of the last    -> seconds
//
// HEAD is what worker.py is told; llama.cpp always computes logits. Settings are those of llama-server: mapped file,
// repacked weights, flash attention where it is supported, f16 caches, sliding-window caches of the window's size.

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

namespace {

constexpr int kBatch = 512;

[[noreturn]] void fail(const std::string &what) {
    std::cerr << "llama_decode: " << what << std::endl;
    std::exit(1);
}

class Bench {
  public:
    Bench(const char *path, int threads) : threads_(threads), batch_(llama_batch_init(kBatch, 0, 1)) {
        llama_log_set([](ggml_log_level level, const char *text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
        }, nullptr);
        llama_backend_init();
        model_ = llama_model_load_from_file(path, llama_model_default_params());
        if (!model_) fail(std::string("cannot load ") + path);
        vocabulary_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
    }

    double open(int depth, int capacity) {
        llama_context_params settings = llama_context_default_params();
        settings.n_ctx = capacity;
        settings.n_batch = settings.n_ubatch = kBatch;
        settings.n_threads = settings.n_threads_batch = threads_;
        settings.swa_full = false;
        llama_context *context = llama_init_from_model(model_, settings);
        if (!context) fail("cannot make a context");
        contexts_[depth] = context;
        double seconds = 0;
        for (int at = 0; at < depth; at += kBatch) seconds += decode(context, at, std::min(kBatch, depth - at), false);
        return seconds;
    }

    double run(int depth, int rows, int calls) {
        llama_context *context = contexts_.at(depth);
        double seconds = 0;
        for (int call = 0; call < calls; call++) seconds += decode(context, depth + call * rows, rows, true);
        rewind(context, depth);
        return seconds / calls;
    }

    double prefill(int rows) {
        llama_context *context = contexts_.at(0);
        double seconds = 0;
        for (int at = 0; at < rows; at += kBatch) seconds += decode(context, at, std::min(kBatch, rows - at), false);
        rewind(context, 0);
        return seconds;
    }

  private:
    double decode(llama_context *context, int position, int rows, bool all) {
        batch_.n_tokens = rows;
        for (int i = 0; i < rows; i++) {
            batch_.token[i] = llama_token((uint64_t(position + i) * 2654435761u) % vocabulary_);  // as in worker.py
            batch_.pos[i] = position + i;
            batch_.n_seq_id[i] = 1;
            batch_.seq_id[i][0] = 0;
            batch_.logits[i] = all || i == rows - 1;
        }
        auto started = std::chrono::steady_clock::now();
        if (llama_decode(context, batch_)) fail("llama_decode failed");
        llama_synchronize(context);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
    }

    static void rewind(llama_context *context, int depth) {
        llama_memory_seq_rm(llama_get_memory(context), 0, depth, -1);
    }

    int threads_;
    llama_batch batch_;
    llama_model *model_ = nullptr;
    uint64_t vocabulary_ = 0;
    std::map<int, llama_context *> contexts_;  // by depth
};

}  // namespace

int main(int argc, char **argv) {
    if (argc != 3) fail("expected MODEL THREADS");
    Bench bench(argv[1], std::atoi(argv[2]));
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string request;
        int a = 0, b = 0, c = 0;
        words >> request >> a >> b >> c;
        if (request == "open") std::cout << bench.open(a, b) << std::endl;
        else if (request == "run") std::cout << bench.run(a, b, c) << std::endl;
        else if (request == "prefill") std::cout << bench.prefill(a) << std::endl;
        else fail("unknown request " + request);
    }
}

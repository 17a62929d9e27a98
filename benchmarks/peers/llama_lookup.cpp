// llama.cpp's n-gram caches behind C functions, used as its example `lookup` uses them: a cache of
// the sequence at hand, one of all earlier sequences and one of a corpus, the last of n-grams of
// two tokens as `lookup-create` makes it. The caches are llama.cpp's own code.

#include "ngram-cache.h"

#include "common.h"
#include "log.h"

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

// What ngram-cache.cpp takes from the rest of llama.cpp: a log, which is silent, a clock that its
// progress reports alone ask, and the end of the program after a failed check.
struct common_log * common_log_main() { return nullptr; }
int common_log_get_verbosity_thold() { return -1; }
void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}
int64_t ggml_time_ms() { return 0; }
void ggml_abort(const char * file, int line, const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fprintf(stderr, "%s:%d: ", file, line);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::abort();
}

namespace {

struct Lookup {
    common_ngram_cache context, dynamic, corpus;
    std::vector<llama_token> tokens;
};

void append(Lookup & lookup, const int32_t * tokens, int count) {
    lookup.tokens.insert(lookup.tokens.end(), tokens, tokens + count);
    common_ngram_cache_update(
        lookup.context, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, lookup.tokens, count, false);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void * lookup_new() { return new Lookup; }

EXPORTED void lookup_free(void * lookup) { delete static_cast<Lookup *>(lookup); }

// Adds a document to the cache of the corpus.
EXPORTED void lookup_add_document(void * lookup, const int32_t * tokens, int count) {
    std::vector<llama_token> document(tokens, tokens + count);
    common_ngram_cache_update(
        static_cast<Lookup *>(lookup)->corpus, LLAMA_NGRAM_STATIC, LLAMA_NGRAM_STATIC, document,
        count, false);
}

// Begins a sequence.
EXPORTED void lookup_open(void * lookup, const int32_t * prompt, int count) {
    Lookup & own = *static_cast<Lookup *>(lookup);
    own.tokens.clear();
    own.context.clear();
    append(own, prompt, count);
}

// Appends tokens and drafts at most `budget` after them; returns how many were written to `draft`.
EXPORTED int lookup_propose(
    void * lookup, const int32_t * tokens, int count, int budget, int32_t * draft) {
    Lookup & own = *static_cast<Lookup *>(lookup);
    append(own, tokens, count);
    if (own.tokens.empty()) {
        return 0;
    }
    std::vector<llama_token> drafted = {own.tokens.back()};
    common_ngram_cache_draft(
        own.tokens, drafted, budget, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, own.context, own.dynamic,
        own.corpus);
    std::copy(drafted.begin() + 1, drafted.end(), draft);
    return static_cast<int>(drafted.size()) - 1;
}

// Ends a sequence with its last tokens; what it held is drafted from in later ones.
EXPORTED void lookup_close(void * lookup, const int32_t * tokens, int count) {
    Lookup & own = *static_cast<Lookup *>(lookup);
    append(own, tokens, count);
    common_ngram_cache_merge(own.dynamic, own.context);
    own.context.clear();
    own.tokens.clear();
}

// SGLang's n-gram corpus behind C functions: its trie of earlier outputs, which SGLang itself binds
// to Python by a library that is not needed here. The corpus is SGLang's own code.

#include "ngram.h"

#include <algorithm>
#include <cstdint>

using sglang::ngram::Ngram;
using sglang::ngram::Param;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Of the tokens of a draft, `of_corpus` are for what the documents hold.
EXPORTED void * ngram_new(
    int64_t capacity, int64_t depth, int64_t breadth, int64_t num_tokens, int64_t of_corpus,
    bool by_frequency) {
    Param param{};
    param.enable = true;
    param.min_bfs_breadth = 1;
    param.max_bfs_breadth = breadth;
    param.max_trie_depth = depth;
    param.draft_token_num = num_tokens;
    param.external_sam_budget = of_corpus;
    param.match_type = by_frequency ? "PROB" : "BFS";
    return new Ngram(capacity, param);
}

EXPORTED void ngram_free(void * corpus) { delete static_cast<Ngram *>(corpus); }

// Takes in documents, parted by SGLang's separator, and drafts from them after the last one.
EXPORTED void ngram_add_document(void * corpus, const int32_t * tokens, int count, int number) {
    Ngram & own = *static_cast<Ngram *>(corpus);
    if (number == 0) {
        own.startExternalCorpusLoad();
    } else {
        own.appendExternalCorpusTokens({sglang::ngram::SuffixAutomaton::kSeparatorToken});
    }
    own.appendExternalCorpusTokens(std::vector<int32_t>(tokens, tokens + count));
}

EXPORTED void ngram_end_documents(void * corpus) {
    static_cast<Ngram *>(corpus)->finishExternalCorpusLoad("documents");
}

// Inserts tokens and every suffix of them, and waits until that is done.
EXPORTED void ngram_insert(void * corpus, const int32_t * tokens, int count) {
    Ngram & own = *static_cast<Ngram *>(corpus);
    own.asyncInsert({std::vector<int32_t>(tokens, tokens + count)});
    own.synchronize();
}

// Drafts after the end of a sequence: writes `num_tokens` tokens, the first of them the sequence's
// last one, and whose descendants they are, a square of that size. Returns how many were written.
EXPORTED int ngram_match(
    void * corpus, int64_t sequence, const int32_t * end, int count, int64_t length,
    int32_t * tokens, uint8_t * mask) {
    const auto result = static_cast<Ngram *>(corpus)->batchMatch(
        {sequence}, {std::vector<int32_t>(end, end + count)}, {static_cast<size_t>(length)});
    std::copy(result.token.begin(), result.token.end(), tokens);
    std::copy(result.mask.begin(), result.mask.end(), mask);
    return static_cast<int>(result.token.size());
}

EXPORTED void ngram_erase(void * corpus, int64_t sequence) {
    static_cast<Ngram *>(corpus)->eraseMatchState({sequence});
}

"""SGLang's own EAGLE worker on a CPU: its drafting, its trees and its verification, without models.

The draft model's logits are scripted; a state has the path that led to it. The target is the pure
function of `sglang_decoding.py`. All between the two is SGLang's: choosing nodes, building trees,
accepting and compacting; its kernels are compiled for the CPU.
"""

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.engines.sglang.conftest import Kernels
from tests.engines.sglang.sglang_decoding import NUM_TOKENS, chosen

_STATE = 12
"""Numbers of a state: the row, then the tokens of the path, -1 behind."""


@dataclass(eq=False)
class EagleRequest:
    """What is read of SGLang's `Req`.

    Attributes:
        tokens: all that the engine has committed; `output_ids` may lag behind.
        num_last: tokens of the last step.
    """

    rid: str
    origin_input_ids_unpadded: "array[int]"
    tokens: list[int]
    output_ids: "array[int]" = field(default_factory=lambda: array("q"))
    sampling_params: Any = None
    num_last: int = 1

    @classmethod
    def of(cls, rid: str, prompt: Sequence[int], **custom_params: Any) -> "EagleRequest":
        """After its prefill, which brings the first token."""
        parameters = SimpleNamespace(custom_params=custom_params or None)
        tokens = [*prompt, chosen(prompt)]
        return cls(rid, array("q", prompt), tokens, sampling_params=parameters)

    def show(self, num_hidden: int) -> None:
        """Show its output, but for the last tokens."""
        output = self.tokens[len(self.origin_input_ids_unpadded) : len(self.tokens) - num_hidden]
        self.output_ids = array("q", output)


class ScriptedRunner:
    """In place of a draft model: right at a stated rate, whatever the row."""

    def __init__(self, top1: float, topk: int) -> None:
        self.top1 = top1
        self.topk = topk
        self.contexts: list[list[int]] = []
        self.canary_manager = None
        architectures = SimpleNamespace(architectures=["Scripted"])
        self.model_config = SimpleNamespace(hf_config=architectures, model_is_mrope=False)

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        """Return float32[NUM_TOKENS]."""
        drawn = Random(hash(tuple(context)))
        tokens = drawn.sample(range(NUM_TOKENS), NUM_TOKENS)
        if drawn.random() < self.top1:
            tokens.remove(chosen(context))
            tokens.insert(0, chosen(context))
        shares = torch.full((NUM_TOKENS,), 1e-3)
        for rank, token in enumerate(tokens[:8]):
            shares[token] = self.top1 * (1 - self.top1) ** rank + 1e-3
        return shares.log()

    def first(self, contexts: Sequence[list[int]]) -> tuple[torch.Tensor, ...]:
        """Return what the engine keeps of its last reading: probabilities, tokens and states."""
        self.contexts = [list(each) for each in contexts]
        shares = torch.stack([self.logits(each) for each in contexts]).softmax(-1)
        best = shares.topk(self.topk, dim=-1)
        states = torch.full((len(contexts), _STATE), -1.0)
        states[:, 0] = torch.arange(len(contexts))
        return best.values, best.indices, states

    def forward(self, forward_batch: Any) -> Any:
        """Read tokens; as the engine calls it."""
        states = forward_batch.spec_info.hidden_states.clone()
        for row, token in enumerate(forward_batch.input_ids.tolist()):
            states[row, int((states[row] >= 0).sum())] = token
        logits = torch.stack([self.logits(self._context(state)) for state in states])
        output = SimpleNamespace(next_token_logits=logits, hidden_states=states)
        return SimpleNamespace(logits_output=output)

    def _context(self, state: torch.Tensor) -> list[int]:
        row, *path = [int(each) for each in state.tolist() if each >= 0]
        return [*self.contexts[row], *path]


class EagleEngine:
    """SGLang's worker, and steps as its scheduler makes them.

    Args:
        patch: undoes what stands for devices.
        kernels: of SGLang.
        topk: of its drafter.
        steps: depth of that's trees.
        width: nodes of a tree, the last committed token included.
        top1: how often its first token is right.
        lags: whether requests do not show the tokens of the last step yet, as with overlap.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (how the engine is set up)
        self,
        patch: Any,
        kernels: Kernels,
        topk: int,
        steps: int,
        width: int,
        top1: float,
        lags: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode  # noqa: PLC0415
        from sglang.srt.speculative import eagle_utils, eagle_worker_v2, spec_utils  # noqa: PLC0415

        later = spec_utils._select_top_k_tokens_later  # compiled, which takes a minute
        plain = getattr(later, "_torchdynamo_orig_callable", later)
        patch.setattr(spec_utils, "_select_top_k_tokens_later", plain)
        spec = SimpleNamespace(
            speculative_use_rejection_sampling=False, speculative_eagle_topk=topk
        )
        for module in (eagle_utils, eagle_worker_v2):
            patch.setattr(module, "get_spec", lambda: spec)
        patch.setattr(eagle_utils, "build_tree_kernel_efficient_func", kernels.build_tree)
        patch.setattr(eagle_utils, "verify_tree_greedy_func", kernels.verify_paths)
        patch.setattr(eagle_worker_v2, "prepare_for_draft", self._prepared)
        patch.setattr(eagle_worker_v2, "renorm_draft_probs", lambda each, *_: each.softmax(-1))
        patch.setattr(eagle_worker_v2, "forward_context", lambda *_, **__: nullcontext())
        self.lags = lags
        self.runner = ScriptedRunner(top1, topk)
        self.num_drafts = 0
        self.verified: list[Any] = []
        worker: Any = object.__new__(eagle_worker_v2.EagleDraftWorker)
        target = SimpleNamespace(
            tokenizer=None,
            model_runner=SimpleNamespace(
                attn_backend=SimpleNamespace(verify_mask=None, max_context_len=512),
                model_config=SimpleNamespace(vocab_size=NUM_TOKENS),
                kv_index_translator=None,
            ),
        )
        worker.__dict__ |= {
            "topk": topk,
            "speculative_num_steps": steps,
            "speculative_num_draft_tokens": width,
            "device": "cpu",
            "target_worker": target,
            "req_to_token_pool": None,
            "cuda_graph_runner": None,
            "draft_worker": SimpleNamespace(model_runner=self.runner),
            "draft_runner": self.runner,
            "hot_token_id": None,
            "seed_dsa_topk_from_draft_extend": False,
            "index_share_for_mtp_iteration": False,
            "tree_mask_mode": TreeMaskMode.FULL_MASK,
            "draft_attn_backend": SimpleNamespace(
                init_forward_metadata=lambda _: None, attn_backends=[None] * steps
            ),
        }
        if topk == 1:
            worker._topk1_parents_prealloc = torch.arange(-1, steps - 1).repeat(8, 1)
            worker._topk1_score_indices_prealloc = torch.arange(steps).repeat(8, 1)
        self.draft_worker, self.target_worker = worker, target
        self.width = width

    def step(self, worker: Any, requests: Sequence[EagleRequest]) -> None:
        """One decoding step."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415
        from sglang.srt.speculative.eagle_info import EagleDraftInput  # noqa: PLC0415

        for request in requests:
            request.show(request.num_last if self.lags else 0)
        probabilities, tokens, states = self.runner.first([each.tokens for each in requests])
        lengths = torch.tensor([len(each.tokens) - 1 for each in requests])
        batch = SimpleNamespace(
            reqs=list(requests),
            seq_lens=lengths,
            seq_lens_sum=int(lengths.sum()),
            forward_mode=ForwardMode.DECODE,
            device="cpu",
            sampling_info=GREEDY,
            return_logprob=False,
            spec_info=EagleDraftInput(
                topk_p=probabilities,
                topk_index=tokens,
                hidden_states=states,
                bonus_tokens=torch.tensor([each.tokens[-1] for each in requests]),
            ),
        )
        batch.spec_info = worker.draft_worker.draft(batch)
        self.verified.append((batch.spec_info, lengths, [list(each.tokens) for each in requests]))
        result = worker.verify(batch)
        for row, request in enumerate(requests):
            length = int(result.accept_lens[row])
            came = result.next_token_ids.view(len(requests), -1)[row, :length].tolist()
            request.tokens += came
            request.num_last = length

    def verify(self, batch: Any) -> Any:
        """Verify as the engine does, with the target's logits."""
        from sglang.srt.managers.utils import GenerationBatchResult  # noqa: PLC0415
        from sglang.srt.speculative.eagle_utils import eagle_sample  # noqa: PLC0415
        from sglang.srt.speculative.eagle_worker_common import (  # noqa: PLC0415
            _compact_accept_to_front,
        )

        verify_input, rows = batch.spec_info, len(batch.reqs)
        logits = torch.zeros(rows * self.width, NUM_TOKENS)
        for row, request in enumerate(batch.reqs):
            for node, path in enumerate(paths(verify_input, batch.seq_lens, row)):
                logits[row * self.width + node, chosen([*request.tokens, *path])] = 1
        output = SimpleNamespace(next_token_logits=logits)
        predict, lengths, index = eagle_sample(verify_input, batch, output)
        if self.draft_worker.topk > 1:
            predict = _compact_accept_to_front(predict, index, rows, num_draft_tokens=self.width)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=predict,
            accept_lens=lengths,
            speculative_num_draft_tokens=self.width,
        )

    def _prepared(self, draft_input: Any, _pool: Any, batch: Any, *_: Any, **__: Any) -> Any:
        self.num_drafts += 1
        rows, topk = len(batch.reqs), self.draft_worker.topk
        forward_batch = SimpleNamespace(
            spec_info=draft_input,
            forward_mode=batch.forward_mode,
            batch_size=rows,
            out_cache_loc=torch.zeros(rows * topk * self.draft_worker.speculative_num_steps),
            positions=batch.seq_lens.repeat_interleave(topk),
            sampling_info=batch.sampling_info,
            mark_forward_metadata_ready=lambda: None,
        )
        return forward_batch, False, None


GREEDY = SimpleNamespace(
    is_all_greedy=True,
    acc_additive_penalties=None,
    acc_scaling_penalties=None,
    logit_bias=None,
    has_watermark_candidates=False,
)


def masks(verify_input: Any, lengths: torch.Tensor) -> list[Any]:
    """Return bool[width, width] of each row, which nodes see which; that all see the prefix."""
    width, start, found = verify_input.draft_token_num, 0, []
    for length in lengths.tolist():
        size = width * (length + width)
        rows = verify_input.custom_mask[start : start + size].view(width, length + width)
        assert rows[:, :length].all()
        found.append(rows[:, length:].numpy())
        start += size
    return found


def paths(verify_input: Any, lengths: torch.Tensor, row: int) -> list[list[int]]:
    """Return the drafted tokens from the root to each node of a row, by the mask."""
    tokens = verify_input.draft_token.view(len(lengths), -1)[row].numpy()
    mask = masks(verify_input, lengths)[row]
    return [tokens[np.flatnonzero(seen)[1:]].tolist() for seen in mask]

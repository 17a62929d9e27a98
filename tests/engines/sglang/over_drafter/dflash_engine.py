"""SGLang's own DFlash worker on a CPU: its step from the block's draft to what is accepted.

`forward_batch_generation` is the engine's, with its head, its links of grammars, its acceptance and
its next input. The draft model's states are scripted, and the target is the pure function of
`sglang_decoding.py`; what moves keys and values, which are none here, does nothing.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.sglang.over_drafter.eagle_engine import EagleRequest
from tests.engines.sglang.sglang_decoding import NUM_TOKENS, chosen

BLOCK = 8
"""Tokens of a block, the last committed one included."""


class _Lengths(torch.Tensor):
    """Lengths on a CPU, whose streams are none."""

    def record_stream(self, stream: Any) -> None:
        assert stream is not None


class _Plan(SimpleNamespace):
    """Where keys and values go: nowhere."""

    def bind(self, *_: Any) -> None:
        """Bind nothing."""


class DFlashEngine:
    """SGLang's worker, and steps as its scheduler makes them.

    Args:
        patch: undoes what stands for devices.
        base: the worker's class.
        top1: how often a drafted token is right, if those before it are.
        lags: whether requests do not show the tokens of the last step yet, as with overlap.
    """

    def __init__(
        self,
        patch: Any,
        base: type,
        top1: float,
        lags: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        from sglang.srt.speculative import dflash_info, dflash_worker_v2  # noqa: PLC0415

        self.lags, self.top1 = lags, top1
        self.num_drafts = 0
        self.verified: list[torch.Tensor] = []
        self.linked: list[torch.Tensor] = []
        self._contexts: list[list[int]] = []
        parallel = SimpleNamespace(attn_dp_enabled=False, tp_rank=0)
        patch.setattr(dflash_worker_v2, "get_parallel", lambda: parallel)
        patch.setattr(dflash_worker_v2, "enable_num_token_non_padded", lambda: False)
        patch.setattr(dflash_worker_v2, "draft_tp_context", lambda _: nullcontext())
        patch.setattr(dflash_worker_v2, "assign_extend_cache_locs_func", _no_places)
        patch.setattr(dflash_worker_v2, "build_grammar_vocab_mask", self._mask)
        patch.setattr(
            dflash_info.DFlashVerifyInput,
            "prepare_for_verify",
            lambda verify_input, *_, **__: (verify_input, False),
        )
        worker: Any = object.__new__(base)
        model = SimpleNamespace(
            get_input_embeddings=lambda: torch.nn.Embedding(NUM_TOKENS, NUM_TOKENS),
            lm_head=SimpleNamespace(weight=torch.eye(NUM_TOKENS)),
        )
        runner = SimpleNamespace(
            model=model,
            model_config=SimpleNamespace(vocab_size=NUM_TOKENS),
            kv_index_translator=SimpleNamespace(plan=lambda **_: _Plan()),
            req_to_token_pool=SimpleNamespace(req_to_token=None),
        )
        target = SimpleNamespace(
            tokenizer=None, model_runner=runner, forward_batch_generation=self._verify
        )
        worker.__dict__ |= {
            "device": "cpu",
            "block_size": BLOCK,
            "model_runner": runner,
            "_target_worker": target,
            "draft_model": SimpleNamespace(),
            "draft_model_runner": SimpleNamespace(forward=self._draft, kv_index_translator=None),
            "draft_parallel_layout": None,
            "selector": None,
            "lilicorr": None,
            "_selector_sample": None,
            "_draft_sampler": None,
            "_is_domino": False,
            "_mask_token_id": 0,
            "_full_embed_gpu": None,
            "_noise_embed_scale": 1.0,
            "_use_triton_prepare_block": False,
            "_use_triton_accept_bonus": False,
            "_block_pos_offsets": torch.arange(BLOCK),
            "_draft_block_ids_buf": None,
            "_draft_block_tokens_buf": None,
            "_draft_block_spec_info": None,
            "use_compact_draft_cache": False,
            "_target_logits_processor": None,
            "_need_mamba_verify_commit": False,
            "_tp_sync": SimpleNamespace(sync=lambda *_: None),
            "_draft_write_ids": lambda _: torch.zeros(len(self._contexts) * BLOCK),
            "_append_target_hidden_to_draft_kv_by_loc": lambda **_: None,
        }
        self.worker = worker

    def step(self, requests: Sequence[EagleRequest], *, has_grammar: bool = False) -> None:
        """One decoding step."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415
        from sglang.srt.speculative.dflash_worker_v2 import make_draft_input_v2  # noqa: PLC0415

        for request in requests:
            request.show(request.num_last if self.lags else 0)
        self._contexts = [list(each.tokens) for each in requests]
        lengths = torch.tensor([len(each.tokens) - 1 for each in requests])
        last = torch.tensor([each.tokens[-1] for each in requests])
        batch = SimpleNamespace(
            reqs=list(requests),
            seq_lens=lengths.as_subclass(_Lengths),
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            req_pool_indices=torch.arange(len(requests)),
            forward_mode=ForwardMode.DECODE,
            is_extend_in_batch=False,
            can_run_decode_cuda_graph=False,
            has_grammar=has_grammar,
            return_logprob=False,
            sampling_info=None,
            spec_info=make_draft_input_v2(bonus_tokens=last, new_seq_lens=lengths),
        )
        result = self.worker.forward_batch_generation(batch)
        for row, request in enumerate(requests):
            length = int(result.accept_lens[row])
            came = result.next_token_ids.view(len(requests), -1)[row, :length].tolist()
            request.tokens += came
            request.num_last = length
        after = result.next_draft_input.bonus_tokens.tolist()
        assert after == [each.tokens[-1] for each in requests]

    def _draft(self, forward_batch: Any) -> Any:
        """Stand for the draft model: states whose greatest number is that of the drafted token."""
        self.num_drafts += 1
        assert forward_batch.input_ids.view(-1, BLOCK)[:, 0].tolist() == [
            each[-1] for each in self._contexts
        ]
        states = torch.zeros(len(self._contexts), BLOCK, NUM_TOKENS)
        for row, context in enumerate(self._contexts):
            path = list(context)
            for place in range(1, BLOCK):
                drawn = Random(hash(tuple(path)))
                is_right = drawn.random() < self.top1
                path.append(chosen(path) if is_right else drawn.randrange(NUM_TOKENS))
                states[row, place, path[-1]] = 1
        return SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=states.flatten(0, 1)), can_run_graph=False
        )

    def _verify(self, *, forward_batch: Any, **_: Any) -> Any:
        """Stand for the target: logits after each token of the blocks that the engine passes."""
        blocks = forward_batch.draft_token.view(len(self._contexts), BLOCK)
        self.verified.append(blocks.clone())
        logits = torch.zeros(*blocks.shape, NUM_TOKENS)
        for row, (context, block) in enumerate(zip(self._contexts, blocks.tolist(), strict=True)):
            for place in range(BLOCK):
                logits[row, place, chosen([*context, *block[1 : place + 1]])] = 1
        output = SimpleNamespace(
            next_token_logits=logits.flatten(0, 1), hidden_states=torch.zeros(blocks.numel(), 1)
        )
        return SimpleNamespace(
            logits_output=output,
            can_run_cuda_graph=False,
            routed_experts_output=None,
            indexer_topk_output=None,
        )

    def _mask(self, *, tree: Any, **_: Any) -> Any:
        """Note which tokens a grammar was led along; it allows all."""
        self.linked.append(tree.resolve()[2].clone())
        return SimpleNamespace(apply=lambda _: None)


def _no_places(*, batch_size: int, draft_token_num: int, **_: Any) -> torch.Tensor:
    return torch.zeros(batch_size * draft_token_num, dtype=torch.int64)

"""Encodes prompts and conversations as a model sees them."""

from typing import TYPE_CHECKING

from indexer.errors import TokenizerError, reason_of
from indexer.tokenizer.core_tokenizer import CoreTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: "CoreTokenizer | PreTrainedTokenizerBase",
    text: str,
    *,
    is_chat: bool = True,
    system: str | None = None,
) -> list[int]:
    """Return a prompt's token ids, as the model would see them.

    Args:
        tokenizer: tokenizer of the model.
        text: a user's message, or a text to continue.
        is_chat: whether to put the text into the tokenizer's chat template, if it has one.
        system: system message for the template; `None` leaves it to the template.

    Raises:
        TokenizerError: there is no template for a system message, or it does not accept one.
    """
    if not is_chat or not tokenizer.chat_template:
        if system is not None:
            raise TokenizerError(
                "a system message needs a chat template: this tokenizer has none, or it is not used"
            )
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return encode_chat(tokenizer, messages)


def encode_chat(
    tokenizer: "CoreTokenizer | PreTrainedTokenizerBase", messages: list[dict[str, str]]
) -> list[int]:
    """Return the token ids of a conversation, up to the start of the model's answer.

    Args:
        tokenizer: tokenizer of the model, with a chat template.
        messages: objects with `role` and `content`, in order.

    Raises:
        TokenizerError: the template does not accept the messages.
    """
    return list(tokenizer.encode(_rendered(tokenizer, messages), add_special_tokens=False))


def _rendered(
    tokenizer: "CoreTokenizer | PreTrainedTokenizerBase", messages: list[dict[str, str]]
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    except TokenizerError:
        raise
    # Templates come with models, and each template raises its own errors.
    except Exception as error:
        roles = " and ".join(dict.fromkeys(message["role"] for message in messages))
        raise TokenizerError(
            f"the chat template does not take a {roles} message: {reason_of(error)}"
        ) from error

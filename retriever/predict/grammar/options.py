"""Options of a constraint, for every command that takes one."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from indexer.errors import reason_of
from indexer.flags import RARE, Metavar
from retriever.drafter import OutputConstraint
from retriever.errors import InvalidConstraintError


class ConstraintSettings(BaseModel):
    """What outputs must look like."""

    model_config = ConfigDict(title="Output", extra="forbid", frozen=True, defer_build=True)

    regex: Annotated[
        str | None,
        Metavar("PATTERN"),
        Field(description="The whole answer matches this regular expression."),
    ] = None
    json_schema: Annotated[
        Path | None,
        Metavar("FILE"),
        Field(description="The whole answer is JSON that this schema describes."),
    ] = None
    choice: Annotated[
        tuple[str, ...],
        RARE,
        Metavar("TEXT"),
        Field(description="The whole answer is one of these texts. Repeatable."),
    ] = ()
    tools: Annotated[
        Path | None,
        RARE,
        Metavar("FILE"),
        Field(
            description="The whole answer is a call of one of these tools, "
            '{"name": ..., "arguments": ...}. The file is a JSON list as in OpenAI\'s API.'
        ),
    ] = None

    def constraint(self) -> OutputConstraint | None:
        """Return the constraint; None if none is given.

        Raises:
            InvalidConstraintError: a file cannot be read, or several constraints are given.
        """
        given = (self.regex, self.json_schema, self.choice or None, self.tools)
        if sum(each is not None for each in given) > 1:
            raise InvalidConstraintError("give one of --regex, --json-schema, --choice and --tools")
        if self.tools is not None:
            from retriever.predict.grammar.grammars import tools_schema  # noqa: PLC0415  (numba)

            return OutputConstraint(json_schema=json.dumps(tools_schema(_json_in(self.tools))))
        if self.json_schema is not None:
            return OutputConstraint(json_schema=json.dumps(_json_in(self.json_schema)))
        if self.regex is not None:
            return OutputConstraint(regular_expression=self.regex)
        return OutputConstraint(choices=self.choice) if self.choice else None


def _json_in(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidConstraintError(f"{path} cannot be read: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidConstraintError(f"{path} is not JSON: {error}") from error

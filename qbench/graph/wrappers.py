"""Torch modules that put pooling and normalisation inside the exported graph."""

from __future__ import annotations

from typing import Any

import torch


class Classifier(torch.nn.Module):
    """Gives the logits of a sequence classifier, shape [batch, classes]."""

    def __init__(self, model: Any) -> None:
        """Keep the model under the name ``model``, the prefix that layer names drop."""
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits."""
        extra = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra)
        return result.logits  # type: ignore[no-any-return]


class Embedder(torch.nn.Module):
    """Gives one vector a text, shape [batch, hidden]; or all hidden states without pooling."""

    def __init__(self, model: Any, pooling: str, normalize: bool) -> None:
        """Keep the model under the name ``model``, the prefix that layer names drop."""
        super().__init__()
        self.model = model
        self.pooling = pooling
        self.normalize = normalize

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the embedding."""
        extra = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra)
        pooled = self._pool(result.last_hidden_state, attention_mask)
        return torch.nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled

    def _pool(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if self.pooling == "none":
            return hidden
        if self.pooling == "cls":
            return hidden[:, 0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        if self.pooling == "mean":
            return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        if self.pooling == "max":
            return hidden.masked_fill(mask == 0, -1e4).max(1).values
        last = (attention_mask * torch.arange(hidden.shape[1])).argmax(1)
        index = last.view(-1, 1, 1).expand(-1, 1, hidden.shape[2])
        return hidden.gather(1, index).squeeze(1)

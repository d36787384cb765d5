"""A toy decoder whose carry also holds an array that a later layer reads: what backward strategies must get right."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mortice.model import Block, Model, Output, Part

D, V, H = 8, 13, 2


class Attention(Block):
    def __init__(self, layer: int, window: int | None, donor: bool, taker: bool) -> None:
        super().__init__(f"model.layers.{layer}", layer)
        for name in ("q_proj", "o_proj") if taker else ("q_proj", "k_proj", "v_proj", "o_proj"):
            self[name] = nn.Linear(D, D, bias=False)
        self._window, self._donor, self._taker = window, donor, taker

    def __call__(self, carry, ctx):
        h = carry["h"]
        q = ctx.rope(self.q_proj(h).reshape(-1, H, D // H), D // H, base=100.0)
        if self._taker:
            k, v = carry["k"], carry["v"]
        else:
            k, v = (p(h).reshape(-1, H, D // H) for p in (self.k_proj, self.v_proj))
            k = ctx.rope(k, D // H, base=100.0)
        out = ctx.attend(q, k, v, scale=0.5, window=self._window, layer=0 if self._taker else self._layer)
        new = {"h": h + self.o_proj(out.reshape(-1, D))}
        if self._donor:
            new |= {"k": k, "v": v}
        elif "k" in carry and not self._taker:
            new |= {"k": carry["k"], "v": carry["v"]}
        return new


class MLP(Block):
    def __init__(self, layer: int) -> None:
        super().__init__(f"model.layers.{layer}", layer)
        self.up_proj, self.down_proj = nn.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, D, bias=False)

    def __call__(self, carry, ctx):
        return carry | {"h": carry["h"] + self.down_proj(mx.tanh(self.up_proj(carry["h"])))}


class Embedding(Part):
    def __init__(self) -> None:
        super().__init__("model")
        self.embed_tokens = nn.Embedding(V, D)


class Final(Part):
    def __init__(self) -> None:
        super().__init__("model")
        self.norm = nn.RMSNorm(D)


class Head(Part):
    def __init__(self) -> None:
        super().__init__("")
        self.lm_head = nn.Linear(D, V, bias=False)


class ToyModel(Model):
    """Three layers; layer 0 gives its keys and values, layer 2 takes them."""

    def __init__(self, *, tied: bool, softcap: float | None = None) -> None:
        self.config = {}
        self._embedding, self._final, self._head = Embedding(), Final(), None if tied else Head()
        self._softcap = softcap
        self.blocks = [
            Attention(0, None, True, False), MLP(0), Attention(1, 3, False, False), MLP(1),
            Attention(2, None, False, True), MLP(2),
        ]  # fmt: skip
        self.parts = [self._embedding, *self.blocks, self._final, *([] if tied else [self._head])]

    def embed(self, tokens, ctx):
        return {"h": self._embedding.embed_tokens(tokens)}

    def finish(self, carry):
        return self._final.norm(carry["h"])

    @property
    def output(self) -> Output:
        if self._head is None:
            return Output(self._embedding.embed_tokens.weight, "model.embed_tokens.weight", softcap=self._softcap)
        return Output(self._head.lm_head.weight, "lm_head.weight", softcap=self._softcap)


def toy(seed: int = 0, *, tied: bool = False, softcap: float | None = None) -> ToyModel:
    model = ToyModel(tied=tied, softcap=softcap)
    names = model.named_parameters()
    keys = mx.random.split(mx.random.key(seed), len(names))
    params = {n: 0.5 * mx.random.normal(v.shape, key=k) for (n, v), k in zip(names.items(), keys)}
    model.bind(params)
    model.mark_trainable(params)
    return model

"""Says how well a feed's batches mix its samples."""

from __future__ import annotations

from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Spec

from ...feed.options import shuffle_quality
from ...feed.options.plan_sizes import block_samples, pooled_lanes


def mixing(plan: FeedPlan, spec: Spec, n_splits: int) -> str:
    """Describe how wide a range the samples of a batch come from. `feed_warnings.mixing_warning` judges it."""
    if plan.weights:
        return "each sample is drawn from all items, by weights="
    unit = "samples" if plan.batch_size is not None else "batches"
    if plan.permuted:
        return f"the {plan.items} items are permuted in each epoch"
    if not plan.shuffle:
        return f"none: {unit} keep their order (no shuffle=)"
    if plan.length is not None:
        if plan.block is not None:
            return f"blocks of {plan.block} neighbours are permuted, then each {plan.shuffle} {unit} are mixed"
        return f"all {plan.length} items are permuted in each epoch"
    found = shuffle_quality.mixing(plan, n_splits, pool=pooled_lanes(plan, spec))
    if found is not None:
        return found.text
    return (
        f"each batch mixes {block_samples(plan.shuffle, min(plan.lanes, n_splits), plan.batch_size)} {unit} of a lane"
    )

"""Few sets of features in which every compatible pair occurs together."""

import itertools

import cases

LARGEST = 9  # features of a set


def fits(feature, chosen):
    return cases.compatible(feature, *chosen)


def cover():
    """Greedy: each set takes, one by one, the feature that adds most pairs not yet met."""
    features = list(cases.FEATURES)
    missing = {pair for pair in itertools.combinations(features, 2) if cases.compatible(*pair)}
    sets = []
    while missing:
        chosen = list(min(missing, key=lambda pair: [features.index(name) for name in pair]))
        while len(chosen) < LARGEST:
            def gain(feature):
                return sum(tuple(sorted((feature, other), key=features.index)) in missing
                           for other in chosen)
            able = [f for f in features if f not in chosen and fits(f, chosen)]
            best = max(able, key=gain, default=None)
            if best is None or gain(best) == 0:
                break
            chosen.append(best)
        chosen.sort(key=features.index)
        missing -= set(itertools.combinations(chosen, 2))
        sets.append(tuple(chosen))
    return sets

"""Planners of the current counts, written as their descriptions go, one token at a time where that is how they are
told.

``tokens_RE``: what each source routes to each expert; R divides nothing: expert e lives on rank e // ceil(E / R). Each
gives ``{(source, expert, destination): tokens}`` without zeros.
"""

from collections import Counter
from math import ceil


def homes(tokens_RE):
    R, E = len(tokens_RE), len(tokens_RE[0])
    return [e // ceil(E / R) for e in range(E)]


def numbered(tokens_RE, expert):
    """The source of each of an expert's tokens, in the order of sources."""
    return [source for source, row in enumerate(tokens_RE) for _ in range(row[expert])]


def moon_ep(tokens_RE):
    R, E, home = len(tokens_RE), len(tokens_RE[0]), homes(tokens_RE)
    count = [sum(row[e] for row in tokens_RE) for e in range(E)]
    total = sum(count)
    balance = {r: sum(count[e] for e in range(E) if home[e] == r) - total // R - (r < total % R) for r in range(R)}
    z = Counter()
    while max(balance.values()) > 0 > min(balance.values()):
        h = sorted(balance, key=lambda r: (-balance[r], r))[0]
        u = sorted(balance, key=lambda r: (balance[r], r))[0]
        z[h, u] = -balance[u]
        balance[h] -= z[h, u]
        balance[u] = 0
    gets = {(r, e): count[e] if home[e] == r else 0 for r in range(R) for e in range(E)}
    for h in range(R):
        left = {e: count[e] for e in range(E) if home[e] == h}
        while open_to := [u for u in range(R) if z[h, u] > 0]:
            u = max(open_to, key=lambda r: (z[h, r], -r))
            e = max(left, key=lambda each: (left[each], -each))
            move = min(z[h, u], left[e])
            z[h, u] -= move
            left[e] -= move
            gets[h, e] -= move
            gets[u, e] += move
    plan = Counter()
    for e in range(E):
        to = [r for r in range(R) for _ in range(gets[r, e])]
        plan.update((source, e, r) for source, r in zip(numbered(tokens_RE, e), to, strict=True))
    return dict(plan)


def llep(tokens_RE, alpha_percent, min_tokens, skip_percent, slots):
    R, E, home = len(tokens_RE), len(tokens_RE[0]), homes(tokens_RE)
    count = [sum(row[e] for row in tokens_RE) for e in range(E)]
    cap = alpha_percent * (sum(count) // R) // 100 or sum(count)
    pending = [sum(count[e] for e in range(E) if home[e] == r) for r in range(R)]
    assigned = [0] * R
    borrowed = [set() for _ in range(R)]
    spare = [slots[r] - home.count(r) for r in range(R)]
    calm = 100 * max(count) * E < skip_percent * sum(count)
    plan = Counter()

    def effective(r):
        return assigned[r] + pending[r]

    for e in sorted(range(E), key=lambda each: (-count[each], each)):
        to = []
        pending[home[e]] -= count[e]
        room = cap - effective(home[e])
        if room >= count[e] or calm or R == 1:
            to += [home[e]] * count[e]
        elif room > 0:
            to += [home[e]] * room
        assigned[home[e]] += len(to)
        while (rest := count[e] - len(to)) > 0:
            others = sorted((r for r in range(R) if r != home[e]), key=lambda r: (effective(r), r))
            others = [r for r in others if e in borrowed[r] or len(borrowed[r]) < spare[r]]
            taker, chunk = (others or [home[e]])[0], rest
            for r in others:
                offer = min(rest, cap - effective(r))
                if offer > 0 and (offer >= min_tokens or offer == rest):
                    taker, chunk = r, offer
                    break
            to += [taker] * chunk
            assigned[taker] += chunk
            if taker != home[e]:
                borrowed[taker].add(e)
        plan.update((source, e, r) for source, r in zip(numbered(tokens_RE, e), to, strict=True))
    return dict(plan)


def ultra_ep(tokens_RE, tolerance_percent, min_tokens, slots, domains):
    """``domains``: lists of ranks."""
    R, E, home = len(tokens_RE), len(tokens_RE[0]), homes(tokens_RE)
    count = [sum(row[e] for row in tokens_RE) for e in range(E)]
    load = [sum(count[e] for e in range(E) if home[e] == r) for r in range(R)]
    copies = {}

    def greedy(ranks, tau, piece_of):
        given, excess, slack = {}, {}, {}
        for r in ranks:
            excess[r], slack[r] = max(load[r] - tau, 0), max(tau - load[r], 0)
        used = Counter()
        for r in sorted(ranks, key=lambda each: (-load[each], each)):
            for e in sorted((e for e in range(E) if home[e] == r), key=lambda each: (-count[each], each)):
                while excess[r] > 0:
                    could = [
                        u for u in ranks if slack[u] > 0 and used[u] < slots[u] - home.count(u) and (e, u) not in given
                    ]
                    if not could:
                        break
                    u = min(could, key=lambda each: (-slack[each], each))
                    gone = sum(given[key] for key in given if key[0] == e)
                    q = min(excess[r], slack[u], count[e] - 1 - gone)
                    if q <= 0 or q < piece_of(excess[r], len(could)):
                        break
                    given[e, u] = q
                    used[u] += 1
                    slack[u] -= q
                    excess[r] -= q
            if excess[r] > 0:
                return None
        return given

    def plan_domain(ranks):
        mean_up, top = ceil(sum(load[r] for r in ranks) / len(ranks)), max(load[r] for r in ranks)
        tau = -(-mean_up * (100 + tolerance_percent) // 100)
        for _ in range(3):
            if (given := greedy(ranks, tau, lambda need, takers: ceil(need / takers))) is not None:
                return given
            tau += max(1, ceil(top / 100))
        if (given := greedy(ranks, mean_up, lambda *_: min_tokens)) is not None:
            return given
        low, high, best = mean_up + 1, top, {}
        while low < high:
            for probe in sorted({low + (high - low) * i // 5 for i in (1, 2, 3, 4)}):
                given = greedy(ranks, probe, lambda *_: min_tokens)
                if given is not None:
                    high, best = probe, given
                    break
                low = probe + 1
        return best

    for ranks in domains:
        copies |= plan_domain(ranks)
    plan = Counter()
    for e in range(E):
        quota = {u: q for (each, u), q in copies.items() if each == e}
        quota[home[e]] = count[e] - sum(quota.values())
        own = {r: min(tokens_RE[r][e], quota.get(r, 0)) for r in range(R)}
        room = {r: quota[r] - own[r] for r in sorted(quota)}
        for source in range(R):
            plan[source, e, source] += own[source]
            rest = tokens_RE[source][e] - own[source]
            if rest:
                exact = {r: rest * room[r] for r in room}
                got = {r: exact[r] // sum(room.values()) for r in room}
                ranked = sorted(room, key=lambda r: (-(exact[r] % sum(room.values())), r))
                for r in ranked[: rest - sum(got.values())]:
                    got[r] += 1
                for r, tokens in got.items():
                    plan[source, e, r] += tokens
    return {key: tokens for key, tokens in plan.items() if tokens}


def faster_moe(tokens_RE, price, shadow_price, slots):
    """``price`` of a token of the largest expert left, ``shadow_price`` of a shadow."""
    R, E, home = len(tokens_RE), len(tokens_RE[0]), homes(tokens_RE)
    count = [sum(row[e] for row in tokens_RE) for e in range(E)]
    order = sorted(range(E), key=lambda e: (-count[e], e))
    spare = min(slots[r] - home.count(r) for r in range(R)) if R > 1 else 0
    shadows = set()
    estimate = price * count[order[0]]
    for i in range(E - 1):
        if i == spare:
            break
        after = price * count[order[i + 1]] + shadow_price * (i + 1)
        if after >= estimate:
            break
        estimate = after
        shadows.add(order[i])
    plan = {}
    for source in range(R):
        for e in range(E):
            if tokens_RE[source][e]:
                plan[source, e, source if e in shadows else home[e]] = tokens_RE[source][e]
    return plan

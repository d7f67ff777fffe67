"""Who owns which blocks of a tier, how much each tenant may take, and whose turn it is to make room.

- *Limit*: a tenant at its limit makes room from its own blocks; what does not fit even so is refused.
- *Share*: bytes that no other tenant can take away. Whoever is furthest above its share makes room first.

A tenant with a quota has an eviction policy of its own. All others together have one, and no share: among them only the
policy decides. With no quota at all, that is one policy over all blocks, and nothing here costs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.server.eviction.base import EvictionPolicy

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

COMMON: Final = 0  # the group of all tenants without a quota
NOBODY: Final = -1
_UNLIMITED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may have of one tier, in bytes of slots."""

    limit: int = 0  # never more than this; 0 = no limit
    share: int = 0  # never evicted below this by others


NO_QUOTA: Final = Quota()


class Tenants:
    """See the module. Tenants are numbered from 0 on in the order in which they are met.

    Args:
        make_policy: a new, empty eviction policy.
        owners: the tenant of each block, by handle.
        keys_and_values: of blocks, by handle: what `EvictionPolicy.admit` wants to know of them.
    """

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy],
        owners: Callable[[I64], I64],
        keys_and_values: Callable[[I64], tuple[U64, F64 | float]],
    ) -> None:
        self._make_policy = make_policy
        self._owners = owners
        self._keys_and_values = keys_and_values
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._quotas: list[Quota] = []
        self._given: dict[str, Quota] = {}  # also to tenants that are still to come
        self.used: I64 = np.zeros(0, dtype=np.int64)  # bytes of slots, by tenant
        self.refused: I64 = np.zeros(0, dtype=np.int64)  # blocks, by tenant: its quota said no
        self._group: I64 = np.zeros(0, dtype=np.int64)  # by tenant
        self._policies: dict[int, EvictionPolicy] = {COMMON: make_policy()}
        self._members: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks that could be evicted, of all tenants."""
        return sum(len(policy) for policy in self._policies.values())

    # --- tenants -----------------------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        """The number of a tenant, given on first sight."""
        known = self._numbers.get(name)
        if known is not None:
            return known
        number = self._numbers[name] = len(self.names)
        self.names.append(name)
        self._quotas.append(NO_QUOTA)
        self.used = np.append(self.used, 0)
        self.refused = np.append(self.refused, 0)
        self._group = np.append(self._group, COMMON)
        self._regroup(number, np.zeros(0, dtype=np.int64))
        return number

    def quota(self, number: int) -> Quota:
        """What a tenant may have."""
        return self._quotas[number]

    def set_quotas(self, quotas: dict[str, Quota], evictable: Callable[[int], I64]) -> None:
        """Put these quotas in force in place of all former ones. Nothing is evicted yet.

        Args:
            quotas: by name of tenant.
            evictable: the blocks of a tenant that are in the order, by its number; prefixes before what follows them.
        """
        self._given = {name: quota for name, quota in quotas.items() if quota != NO_QUOTA}
        for number in range(len(self.names)):
            self._regroup(number, evictable(number))

    def take(self, number: int, slot_bytes: int) -> None:
        """A tenant has got slots of that many bytes."""
        self.used[number] += slot_bytes

    def give(self, numbers: I64, slot_bytes: I64) -> None:
        """These tenants gave a slot back each, of these bytes. Shapes (n,)."""
        np.subtract.at(self.used, numbers, slot_bytes)

    def room(self, number: int) -> int:
        """Bytes that a tenant may take before it reaches its limit; negative when it is beyond a limit set later."""
        limit = self._quotas[number].limit
        return limit - int(self.used[number]) if limit else _UNLIMITED

    def describe(self) -> list[dict[str, int | str]]:
        """What each tenant has and may have, in bytes of slots, and how many blocks its quota refused."""
        return [
            {
                "tenant": name,
                "used": int(self.used[number]),
                "limit": self._quotas[number].limit,
                "share": self._quotas[number].share,
                "refused": int(self.refused[number]),
            }
            for number, name in enumerate(self.names)
        ]

    # --- whose turn it is --------------------------------------------------------------------------------------------

    def group_of(self, number: int) -> int:
        """The group whose policy orders this tenant's blocks."""
        return int(self._group[number])

    def groups_of(self, handles: I64) -> I64:
        """The group of each block. Shape (n,)."""
        return self._group[self._owners(handles)]

    def policy(self, group: int) -> EvictionPolicy:
        """The eviction order of a group."""
        return self._policies[group]

    @property
    def members(self) -> Mapping[int, int]:
        """The tenant of each group but the common one."""
        return self._members

    @property
    def groups(self) -> Collection[int]:
        """All groups."""
        return self._policies.keys()

    def spare(self, group: int, taker: int) -> int:
        """Bytes that a group may lose to this tenant (or to `NOBODY` in particular): all of them to its own."""
        if group == COMMON:
            return int(self.used.sum()) - int(self.used[list(self._members.values())].sum())
        number = self._members[group]
        return int(self.used[number]) - (0 if number == taker else self._quotas[number].share)

    def protected(self, group: int, taker: int, slot_bytes: int) -> bool:
        """Whether losing so many bytes to this tenant could bring a group below its share."""
        number = self._members.get(group)
        if number is None or number == taker:
            return False
        return self._quotas[number].share > 0 and self.spare(group, taker) < slot_bytes

    def next_to_give(self, taker: int, tired: Collection[int]) -> int | None:
        """The group that makes room next: the one furthest above its share. None: nobody has any to spare.

        Args:
            taker: the tenant that wants room, or NOBODY.
            tired: groups that had nothing that may go.
        """
        if len(self._policies) == 1:
            return None if tired or not len(self._policies[COMMON]) else COMMON
        able = [group for group in self._policies if group not in tired and len(self._policies[group])]
        able = [group for group in able if self.spare(group, taker) > 0]
        # Its own blocks count like everyone's, above the share; only when nobody else has to spare, below it too.
        return max(able, key=lambda group: self.spare(group, NOBODY), default=None)

    # --- the eviction order, of blocks of any tenants ----------------------------------------------------------------

    def note_request(self, keys: U64) -> None:
        """Somebody asked for this chain. Whose it is nobody says, so every policy hears of it."""
        for policy in self._policies.values():
            policy.note_request(keys)

    def admit(self, handles: I64) -> None:
        """These blocks were committed just now."""
        for policy, mine in self._split(handles):
            policy.admit(mine, *self._keys_and_values(mine))

    def touch(self, handles: I64) -> None:
        """These blocks were used just now."""
        for policy, mine in self._split(handles):
            policy.touch(mine)

    def remove(self, handles: I64) -> None:
        """These blocks are gone; forget them."""
        for policy, mine in self._split(handles):
            policy.remove(mine)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _split(self, handles: I64) -> list[tuple[EvictionPolicy, I64]]:
        if len(self._policies) == 1:
            return [(self._policies[COMMON], handles)] if len(handles) else []
        groups = self.groups_of(handles)
        return [(self._policies[group], handles[groups == group]) for group in np.unique(groups).tolist()]

    def _regroup(self, number: int, evictable: I64) -> None:
        """Move a tenant's blocks to the policy that its quota, or the lack of one, asks for."""
        quota = self._given.get(self.names[number], NO_QUOTA)
        self._quotas[number] = quota
        group = int(self._group[number])
        if (group == COMMON) == (quota == NO_QUOTA):
            return
        self._policies[group].remove(evictable)
        if group == COMMON:
            group = number + 1
            self._policies[group] = self._make_policy()
            self._members[group] = number
        else:
            del self._policies[group], self._members[group]
            group = COMMON
        self._group[number] = group
        if len(evictable):
            self._policies[group].admit(evictable, *self._keys_and_values(evictable))

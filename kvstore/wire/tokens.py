"""Session tokens: handed out by the control plane, checked by the data port without asking anybody.

`expiry (8 bytes, seconds since the epoch) ‖ nonce (16) ‖ HMAC-SHA256 over both and the boot id`, hex. The key lives
as long as the server process, so a restart makes every old token worthless.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

_EXPIRY = struct.Struct("<Q")
_NONCE_BYTES = 16
_MAC_BYTES = 32
TOKEN_TTL_S = 24 * 3600


def issue_token(key: bytes, boot_id: str, nonce: bytes, now_s: float, ttl_s: float = TOKEN_TTL_S) -> str:
    """A token that is good until `now_s + ttl_s`. The nonce is 16 random bytes."""
    signed = _EXPIRY.pack(int(now_s + ttl_s)) + nonce[:_NONCE_BYTES].ljust(_NONCE_BYTES, b"\0")
    return (signed + _mac(key, boot_id, signed)).hex()


def token_is_valid(key: bytes, boot_id: str, token: object, now_s: float) -> bool:
    """Whether this server issued the token and it has not run out. Anything malformed is simply not valid."""
    if not isinstance(token, str):
        return False
    try:
        raw = bytes.fromhex(token)
    except ValueError:
        return False
    if len(raw) != _EXPIRY.size + _NONCE_BYTES + _MAC_BYTES:
        return False
    signed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    return hmac.compare_digest(mac, _mac(key, boot_id, signed)) and _EXPIRY.unpack_from(signed)[0] > now_s


def _mac(key: bytes, boot_id: str, signed: bytes) -> bytes:
    return hmac.new(key, boot_id.encode() + signed, hashlib.sha256).digest()

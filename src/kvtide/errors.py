# SPDX-License-Identifier: Apache-2.0
"""The whole error tree. Nothing else in kvtide is raised on purpose.

KvtideError
├── ConfigError            a setting cannot work; says which one and what to write instead
│   ├── FolderOwned        another process owns the disk folder
│   └── FolderForeign      the disk folder holds something that kvtide did not put there
├── Damaged                bytes that came back from a medium are not what was written
│   ├── BadMagic           not a frame at all
│   ├── BadVersion         a frame of a format this version cannot read
│   ├── BadChecksum        header or payload differ from their checksum
│   ├── Truncated          fewer bytes than the header promises
│   ├── BadField           checksum fits, a field is impossible
│   └── Misplaced          a sound frame, but of another key, part, namespace, tenant or scope
├── Rejected               asked for more than a bound allows
│   ├── TooLarge
│   ├── Busy               too many requests under way, or too many sessions
│   └── QuotaExceeded      the tenant's or the scope's share is used up
├── Unavailable            the node service cannot be reached, or went away
├── Denied                 the node service does not know this client, or its role does not allow the call
├── ProtocolError          the other side of a socket says what it must not
├── MediumFailed           a medium could not confirm what must not be left in doubt (clearing a tenant)
├── MissingExtra           an optional dependency is not installed
└── Closed                 used after close()

Operating faults of a medium (full, slow, gone) are no exceptions: tiers answer them with an Outcome,
and the store turns them into misses. Exceptions cross a tier's boundary in `open()` and for
programmer errors only.
"""

from __future__ import annotations


class KvtideError(Exception):
    """Root of the tree. `kind` is a stable word for logs and metrics; `context` holds what it is about."""

    kind = "error"

    def __init__(self, message: str, **context: object) -> None:
        super().__init__(message)
        self.context = context


class ConfigError(KvtideError):
    kind = "config"


class FolderOwned(ConfigError):
    kind = "folder_owned"


class FolderForeign(ConfigError):
    kind = "folder_foreign"


class Damaged(KvtideError):
    kind = "damaged"


class BadMagic(Damaged):
    kind = "bad_magic"


class BadVersion(Damaged):
    kind = "bad_version"


class BadChecksum(Damaged):
    kind = "bad_checksum"


class Truncated(Damaged):
    kind = "truncated"


class BadField(Damaged):
    kind = "bad_field"


class Misplaced(Damaged):
    kind = "misplaced"


class Rejected(KvtideError):
    kind = "rejected"


class TooLarge(Rejected):
    kind = "too_large"


class Busy(Rejected):
    kind = "busy"


class QuotaExceeded(Rejected):
    kind = "quota_exceeded"


class Unavailable(KvtideError):
    kind = "unavailable"


class Denied(KvtideError):
    kind = "denied"


class ProtocolError(KvtideError):
    kind = "protocol"


class MediumFailed(KvtideError):
    kind = "medium_failed"


class MissingExtra(KvtideError):
    kind = "missing_extra"


class Closed(KvtideError):
    kind = "closed"

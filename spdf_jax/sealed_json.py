# SPDX-License-Identifier: Apache-2.0
"""Sealed JSON objects, which contain a digest of their fields."""

from collections.abc import Mapping
import hashlib
import json
from typing import Any

_KEY = 'sha256'


def seal(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the digest of the fields, so that `unseal` detects changes.

  The digest is the SHA-256 of the fields as JSON with sorted keys.

  Args:
    fields: JSON-able fields.

  Returns:
    The fields as JSON stores them, and their digest `'sha256'`.

  Example:
    >>> sorted(seal({'step': 3, 'shape': (2, 1)}).items())[1:]
    [('shape', [2, 1]), ('step', 3)]
  """
  plain = json.loads(json.dumps(_without_digest(fields)))
  return {**plain, _KEY: _digest(plain)}


def unseal(fields: Mapping[str, Any], place: Any) -> dict[str, Any]:
  """Removes the digest of the fields, after comparing it with them.

  Args:
    fields: Fields that `seal` returned; fields without a digest are not
      checked.
    place: File of the fields, for the error message.

  Returns:
    The fields without the digest.

  Raises:
    ValueError: The fields differ from their digest.

  Example:
    >>> unseal(seal({'step': 3}), 'meta.json')
    {'step': 3}
    >>> unseal({**seal({'step': 3}), 'step': 2}, 'meta.json')
    Traceback (most recent call last):
    ...
    ValueError: meta.json is damaged, as its fields differ from their sha256; \
restore the file from a copy or write it again.
  """
  plain = _without_digest(fields)
  if _KEY in fields and fields[_KEY] != _digest(plain):
    raise ValueError(
        f'{place} is damaged, as its fields differ from their {_KEY}; restore'
        ' the file from a copy or write it again.'
    )
  return plain


def _without_digest(fields: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in fields.items() if key != _KEY}


def _digest(fields: Mapping[str, Any]) -> str:
  text = json.dumps(fields, sort_keys=True)
  return hashlib.sha256(text.encode('utf-8')).hexdigest()

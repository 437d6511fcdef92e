"""Refuses files and folders that another user has made or may write, where their content decides what is computed.

Checksums in such files find damage, not forgery: whoever writes a file writes its checksum too. So trust follows from
who may write it: this user, root, and nobody else. The folder that has the file is looked at as well, since who may
write to it can put another file in its place (unless it is sticky, as ``/tmp``). Folders further up are not: what is
put in the place of a whole folder belongs to whoever put it there, and is refused for that at the next start.
"""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

_ACL = "system.posix_acl_access"


def refusal(path: Path) -> str | None:
    """Returns why what is at ``path`` is not used, and the command that mends that; None if it may be used.

    Args:
        path: a file or a folder, without what is in it; need not exist.
    """
    try:
        if path.exists() and (found := problem(path, path.stat())):
            return found
        folders = dict.fromkeys([path.absolute().parent, path.resolve().parent])
        found_there = (problem(folder, folder.stat(), around=True) for folder in folders if folder.exists())
        return next(filter(None, found_there), None)
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"


def problem(path: Path, facts: os.stat_result, *, around: bool = False) -> str | None:
    """As ``refusal`` of ``path`` alone.

    Args:
        facts: what ``os.stat`` says of it.
        around: it is a folder, of which only those files count that other users cannot replace.
    """
    me, owner = os.geteuid(), facts.st_uid
    deep = "-R " if stat.S_ISDIR(facts.st_mode) and not around else ""
    name, as_root = shlex.quote(str(path)), "" if me == 0 else " as root"
    if owner not in (0, me):
        mend = f"`chown {deep}{_user(me)} {name}`{as_root}"
        return (
            f"{path} belongs to {_shown(owner)}, not to {_shown(me)} or root; if you trust it, run {mend} or use a copy"
        )
    if around and facts.st_mode & stat.S_ISVTX:
        return None
    who = []
    if facts.st_mode & stat.S_IWGRP and not _has_one_member(path, facts):
        who.append(f"the group {_group(facts.st_gid)}")
    if facts.st_mode & stat.S_IWOTH:
        who.append("every user")
    if not who:
        return None
    mend = f"`chmod {deep}go-w {name}`{as_root if owner != me else ''}"
    return f"{path} of {_shown(owner)} may be written by {' and '.join(who)}; if you trust it, run {mend}"


def _has_one_member(path: Path, facts: os.stat_result) -> bool:
    """Whether the group is the owner's own: many systems give each user one, and make files group-writable.

    With access control lists the group's bits are those of every user that a list names.
    """
    try:
        owner, group = pwd.getpwuid(facts.st_uid).pw_name, grp.getgrgid(facts.st_gid)
        return group.gr_name == owner and set(group.gr_mem) <= {owner} and _ACL not in os.listxattr(path)
    except (KeyError, OSError):  # not known here, so it may have any number of members
        return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _shown(uid: int) -> str:
    return f"{_user(uid)} (uid {uid})"


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"of gid {gid}"

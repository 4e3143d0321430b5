"""One repository on the hub, through huggingface_hub: retries, and faults as errors that never hold the token.

Resumable           the hub or the network failed for a while, or someone else pushed: the same command goes on
EnvironmentMissing  no token, a token without the right, offline mode
UsageError          the hub refuses what was sent
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from sparkquant.errors import EnvironmentMissing, Resumable, SparkquantError, UsageError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts of calls that huggingface_hub itself does not repeat."""

GO_ON = "run the same command again: files that arrived are not sent twice"
LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write to the repository"
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a revision: `sha256` of its content where it is stored as a large file, else the git `blob` id."""

    sha256: str
    blob: str

    def holds(self, path: Path, addition: CommitOperationAdd | None = None) -> bool:
        """Whether a local file has this content; `addition` may know its sha256 already."""
        if self.sha256 and addition is not None:
            return bool(addition.upload_info.sha256.hex() == self.sha256)
        if self.sha256:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == self.blob


def require_names(repository: str, branch: str | None) -> None:
    """UsageError unless both are names that the hub takes."""
    if not _ID.fullmatch(repository) or ".." in repository or "--" in repository:
        raise UsageError(f"{repository[:100]!r} is no repository", hint="name it owner/name")
    if branch is not None and (not _BRANCH.fullmatch(branch) or ".." in branch or branch.endswith(("/", ".lock"))):
        raise UsageError(f"{branch[:100]!r} is no branch name", hint="name it like fp8-head")


class Hub:
    """A model repository that may be written to. Nothing is sent before the first call."""

    def __init__(self, repository: str, branch: str | None = None) -> None:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars

        require_names(repository, branch)
        self.repository, self.branch = repository, branch or "main"
        token = huggingface_hub.get_token()
        if not token:
            raise EnvironmentMissing("no token for the hub", hint=LOGIN)
        self._token = token
        # Its warnings quote signed upload addresses, its bars one line a file: progress is told by events here.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        disable_progress_bars()
        self._api: HfApi = huggingface_hub.HfApi(token=token, library_name="sparkquant")

    @property
    def url(self) -> str:
        """Where the repository can be looked at."""
        return f"{self._api.endpoint}/{self.repository}"

    def open(self, *, private: bool) -> str:
        """Create repository and branch where they are missing; returns the head of the branch.

        With `private`, a repository that is public already is refused before anything is sent.
        """
        self._call(self._api.create_repo, self.repository, private=private or None, exist_ok=True)
        found = self._call(self._api.model_info, self.repository)
        if private and not found.private:
            raise UsageError(
                f"{self.url} exists and is public", hint="make it private on its settings page, or leave out --private"
            )
        if self.branch != "main":
            self._call(self._api.create_branch, self.repository, branch=self.branch, exist_ok=True)
        return self.head()

    def head(self) -> str:
        """The commit at the end of the branch."""
        return str(self._call(self._api.model_info, self.repository, revision=self.branch).sha)

    def tree(self, revision: str) -> dict[str, RemoteFile]:
        """Every file of a revision."""
        return self._call(self._tree, revision)

    def _tree(self, revision: str) -> dict[str, RemoteFile]:
        from huggingface_hub.hf_api import RepoFile

        entries = self._api.list_repo_tree(self.repository, recursive=True, revision=revision)
        files = [entry for entry in entries if isinstance(entry, RepoFile)]
        return {file.path: RemoteFile(file.lfs.sha256 if file.lfs else "", file.blob_id) for file in files}

    def tags(self) -> dict[str, str]:
        """The commit of every tag."""
        refs = self._call(self._api.list_repo_refs, self.repository)
        return {tag.name: tag.target_commit for tag in refs.tags}

    def addition(self, name: str, path: Path) -> CommitOperationAdd:
        """A file that shall be in the next commit."""
        from huggingface_hub import CommitOperationAdd

        return CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)

    def send(self, addition: CommitOperationAdd) -> None:
        """Upload the content of one file, if it is stored as a large one and the hub does not have it yet."""
        self._call(
            self._api.preupload_lfs_files,
            self.repository,
            [addition],
            revision=self.branch,
            num_threads=1,
            free_memory=False,
        )

    def commit(self, additions: Sequence[CommitOperationAdd], gone: Sequence[str], message: str, parent: str) -> str:
        """One commit with all additions and deletions on top of `parent`; returns its id (`parent` if none is needed).

        A repeated attempt does not fail because an earlier one had arrived and only its answer was lost.
        """
        from huggingface_hub import CommitOperationDelete

        removals = [CommitOperationDelete(path_in_repo=name, is_folder=False) for name in gone]

        def once() -> str:
            head = self.head()
            if head != parent and self._is(head, additions, gone):
                return head
            made = self._api.create_commit(
                self.repository,
                [*additions, *removals],
                commit_message=message,
                revision=self.branch,
                parent_commit=parent,
            )
            return str(made.oid)

        return self._call(once)

    def _is(self, revision: str, additions: Sequence[CommitOperationAdd], gone: Sequence[str]) -> bool:
        found = self._tree(revision)
        return not any(name in found for name in gone) and all(
            addition.path_in_repo in found
            and found[addition.path_in_repo].holds(Path(str(addition.path_or_fileobj)), addition)
            for addition in additions
        )

    def tag(self, name: str, revision: str) -> None:
        """Let a tag name a revision; one that names another is moved."""
        present = self.tags().get(name)
        if present == revision:
            return
        if present is not None:
            self._call(self._api.delete_tag, self.repository, tag=name)
        self._call(self._api.create_tag, self.repository, tag=name, revision=revision, exist_ok=True)

    def _call(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call the hub; repeat what may pass, translate what will not."""
        for pause in (*PAUSES, None):
            try:
                with warnings.catch_warnings():
                    # How the client calls its transport is not for our users to mend, even where warnings are errors.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    return function(*arguments, **options)
            except SparkquantError:
                raise
            except Exception as error:
                if not _is_of_the_hub(error):
                    raise
                fault = self._translated(error)
                if pause is None or not isinstance(fault, _Passing):
                    raise fault from None
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _translated(self, error: BaseException) -> SparkquantError:
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        chain = _chain(error)
        if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
            return EnvironmentMissing("HF_HUB_OFFLINE is set: the hub is not asked", hint="unset HF_HUB_OFFLINE")
        refused = next((link for link in chain if isinstance(link, HfHubHTTPError)), None)
        if refused is not None and refused.response is not None:
            return self._refused(refused)
        told = self._clean(str(chain[-1]) or type(chain[-1]).__name__)
        return _Passing(f"{self.url}: {told}", hint=GO_ON)

    def _refused(self, error: HfHubHTTPError) -> SparkquantError:
        status = error.response.status_code
        told = self._clean(getattr(error, "server_message", None) or str(error))
        what = f"{self.url}: the hub answers {status}: {told}"
        if status in (401, 403):
            return EnvironmentMissing(what, hint=LOGIN)
        if status in (409, 412):
            return Resumable(f"{what} (someone else wrote to the branch meanwhile?)", hint=GO_ON)
        if status == 429 or status >= 500:
            return _Passing(what, hint=GO_ON)
        return UsageError(what, hint="see the answer of the hub, and check the name of the repository")

    def _clean(self, text: str) -> str:
        """One line without the token and without the signed parts of addresses."""
        text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1?...", " ".join(text.split()))
        return text.replace(self._token, "***")[:400]


class _Passing(Resumable):
    """What another attempt may not meet again."""


def _is_of_the_hub(error: Exception) -> bool:
    """Whether an exception comes from talking to the hub: its client and its transports raise built-in ones as well."""
    foreign = type(error).__module__.startswith(("httpx", "httpcore", "huggingface_hub", "hf_xet"))
    return foreign or isinstance(error, ConnectionError | TimeoutError | RuntimeError | ValueError)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what caused it, outermost first."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def changed_names(local: Mapping[str, Any], remote: Mapping[str, RemoteFile]) -> list[str]:
    """Remote files that have to go so that a revision holds `local` alone; hidden ones belong to the hub."""
    return sorted(name for name in remote if name not in local and not name.startswith("."))

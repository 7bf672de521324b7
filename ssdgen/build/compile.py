"""The build: kernels to cubins for any architecture, without a GPU, in parallel, one failure costing one kernel."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from ssdgen.build.blame import failure
from ssdgen.build.elf import CubinError, read_cubin
from ssdgen.build.pool import Pool
from ssdgen.build.store import Store, cache_folder, request_key, sources_digest
from ssdgen.build.worker import Answer, Compiled, Rejected
from ssdgen.ir.build import ARCHITECTURES, Build, CompiledKernel, CompileFailure, CompileRequest

Result = CompiledKernel | CompileFailure
Progress = Callable[[Result, int, int], None]
"""Called with each result as it comes, the number of results so far, and their total."""


def build(
    requests: Sequence[CompileRequest],
    jobs: int | None = None,
    progress: Progress | None = None,
    *,
    cache: bool = True,
    timeout: float = 600.0,
) -> Build:
    """Compile every request, `jobs` at a time (one a core if None), each for at most `timeout` seconds.

    Equal requests compile once, and what the cache holds is not compiled; with `cache=False` the cache is neither
    read nor written. A kernel that does not compile, crashes the compiler or takes too long is a
    `CompileFailure` in the result: nothing is raised for it. When interrupted, no compiler is left running. Raises
    UserError if there is no compiler.
    """
    results: dict[int, Result] = {}

    def finish(indices: Sequence[int], answer: Answer, cached: bool) -> None:
        for index in indices:
            results[index] = _result(requests[index], answer, cached)
            if progress:
                progress(results[index], len(results), len(requests))

    wanted: dict[str, list[int]] = {}
    digest = functools.cache(sources_digest)
    for index, request in enumerate(requests):
        if request.arch not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            finish([index], Rejected(f"cuTile does not compile for {request.arch}; it does for {known}"), cached=False)
            continue
        try:
            wanted.setdefault(request_key(request, digest(request.module_path)), []).append(index)
        except OSError as error:
            finish([index], Rejected(f"the emitted module cannot be read: {error}"), cached=False)

    store = Store(cache_folder() if cache else None)
    missing = []
    for key, indices in wanted.items():
        kept = store.get(key)
        if kept:
            finish(indices, kept, cached=True)
        else:
            missing.append((key, requests[indices[0]]))
    with Pool(jobs or len(os.sched_getaffinity(0)), timeout) as pool:
        for key, answer in pool.run(missing):
            if isinstance(answer, Compiled):
                store.put(key, answer)
            finish(wanted[key], answer, cached=False)
    if missing:
        store.prune()
    return Build(tuple(results[i] for i in range(len(requests))), (store.problem,) if store.problem else ())


def _result(request: CompileRequest, answer: Answer, cached: bool) -> Result:
    if isinstance(answer, Rejected):
        return failure(request, answer)
    try:
        resources = read_cubin(answer.cubin)
    except CubinError as error:
        return CompileFailure(request, f"the compiler's result cannot be read: {error}")
    return CompiledKernel(request, resources, answer.cubin, answer.seconds, cached)

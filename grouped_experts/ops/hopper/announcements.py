"""How a producer that chooses tiles as it goes tells the other warps of a program which comes next."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def announcements(LISTENERS: gl.constexpr):
    """Two places for five numbers (and padding), used in turn, and the barriers of `announce` and `hear`."""
    places = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(announced.index(i), count=1)
        mbarrier.init(heard.index(i), count=LISTENERS)
    return places, announced, heard


@gluon.jit
def announce(turn, a, b, c, d, e, places, announced, heard, WARPS: gl.constexpr = 1):
    """By WARPS warps, once everyone has heard what was said two turns before."""
    i = gl.arange(0, 8, gl.BlockedLayout([1], [32], [WARPS], [0]))
    mbarrier.wait(heard.index(turn % 2), turn // 2 % 2 ^ 1)
    told = gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, gl.where(i == 3, d, e))))
    places.index(turn % 2).store(told)
    mbarrier.arrive(announced.index(turn % 2), count=1)


@gluon.jit
def hear(turn, places, announced, heard):
    """By four warps each: the five numbers of that turn."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])  # all for every thread
    i = gl.arange(0, 8, LAYOUT)
    mbarrier.wait(announced.index(turn % 2), turn // 2 % 2)
    told = places.index(turn % 2).load(LAYOUT)
    mbarrier.arrive(heard.index(turn % 2), count=1)
    a = gl.sum(gl.where(i == 0, told, 0), 0)
    b = gl.sum(gl.where(i == 1, told, 0), 0)
    c = gl.sum(gl.where(i == 2, told, 0), 0)
    d = gl.sum(gl.where(i == 3, told, 0), 0)
    e = gl.sum(gl.where(i == 4, told, 0), 0)
    return a, b, c, d, e

; The CPU executor: runs a bound launch table on a pool of threads. Kernels and this file form one shared library.
;
; A launch is a kernel `void (i64* arguments, i64 begin, i64 end)` and a number of independent units. Threads claim
; `grain` units at a time from an atomic counter, so a thread that the system has put aside delays at most one chunk,
; and never a whole static share; nobody spins for a thread that has not claimed anything.
;
; table:  header 64 B   {i64 launches, ptr state, ...}   state[0] = committed length n, in tokens
;         launch 128 B  {0 ptr kernel, 8 ptr arguments, 16 i64 multiple, 24 i64 addend, 32 i64 divisor, 40 i64 grain,
;                        48 i64 units, 56 i64 need | 64 i64 claimed, 72 i64 done, 80 i64 cycles, 88 ptr group}
;         `cycles` adds up what the leader spent in the launch, over all runs of the table.
;         units = multiple * ceil((n + addend) / divisor), or multiple where divisor = 0; fixed for one run.
;         `group` is the record whose `done` the launch counts into; a record with `group` = itself ends a group: all
;         wait there until `done` = `need`. Launches of one group run at the same time.
; pool:   {0 i32 sequence, 64 ptr table, 72 i64 workers, 80 i32 sleepers, 88 i32 stop, 128 + 64*w ptr inside}
;         `inside` is the table a worker walks, so that nobody resets the counters under it.

; Version of the table's layout and of the kernels' signature; the runtime refuses another one.
define void @dflash_abi_body(ptr %version) {
  store i64 2, ptr %version, align 8
  ret void
}

declare i32 @sched_yield()
declare i64 @syscall(i64, ...)
declare void @llvm.x86.sse2.pause()
declare i64 @llvm.readcyclecounter()

define internal void @relax(i32 %turn) {
  %short = icmp ult i32 %turn, 512
  br i1 %short, label %spin, label %yield
spin:
  call void @llvm.x86.sse2.pause()
  ret void
yield:
  %ignored = call i32 @sched_yield()
  ret void
}

define internal void @walk(ptr %table, i1 %leader) {
entry:
  %count = load i64, ptr %table, align 8
  %started = call i64 @llvm.readcyclecounter()
  br label %launch

launch:
  %index = phi i64 [ 0, %entry ], [ %following, %next ], [ %following, %note ]
  %before = phi i64 [ %started, %entry ], [ %after, %next ], [ %after, %note ]
  %finished = icmp eq i64 %index, %count
  br i1 %finished, label %return, label %open

open:
  %scaled = shl i64 %index, 7
  %offset = add i64 %scaled, 64
  %record = getelementptr i8, ptr %table, i64 %offset
  %kernel = load ptr, ptr %record, align 8
  %arguments.at = getelementptr i8, ptr %record, i64 8
  %arguments = load ptr, ptr %arguments.at, align 8
  %grain.at = getelementptr i8, ptr %record, i64 40
  %grain = load i64, ptr %grain.at, align 8
  %units.at = getelementptr i8, ptr %record, i64 48
  %units = load i64, ptr %units.at, align 8
  %claimed = getelementptr i8, ptr %record, i64 64
  %group.at = getelementptr i8, ptr %record, i64 88
  %group = load ptr, ptr %group.at, align 8
  %done = getelementptr i8, ptr %group, i64 72
  br label %claim

claim:
  %seen = load atomic i64, ptr %claimed monotonic, align 8
  %exhausted = icmp sge i64 %seen, %units
  br i1 %exhausted, label %leave, label %take
take:
  %begin = atomicrmw add ptr %claimed, i64 %grain monotonic
  %late = icmp sge i64 %begin, %units
  br i1 %late, label %leave, label %work
work:
  %until = add i64 %begin, %grain
  %clipped = icmp sgt i64 %until, %units
  %end = select i1 %clipped, i64 %units, i64 %until
  call void %kernel(ptr %arguments, i64 %begin, i64 %end)
  %size = sub i64 %end, %begin
  %counted = atomicrmw add ptr %done, i64 %size release
  br label %claim

leave:
  %last = icmp eq ptr %group, %record
  br i1 %last, label %barrier, label %next

barrier:
  %need.at = getelementptr i8, ptr %record, i64 56
  %need = load i64, ptr %need.at, align 8
  br label %wait
wait:
  %turn = phi i32 [ 0, %barrier ], [ %again, %pause ]
  %reached = load atomic i64, ptr %done acquire, align 8
  %complete = icmp sge i64 %reached, %need
  br i1 %complete, label %next, label %pause
pause:
  call void @relax(i32 %turn)
  %again = add i32 %turn, 1
  br label %wait

next:
  %after = call i64 @llvm.readcyclecounter()
  %spent = sub i64 %after, %before
  %cycles = getelementptr i8, ptr %record, i64 80
  %following = add i64 %index, 1
  br i1 %leader, label %note, label %launch
note:
  %earlier = load i64, ptr %cycles, align 8
  %altogether = add i64 %earlier, %spent
  store i64 %altogether, ptr %cycles, align 8
  br label %launch

return:
  ret void
}

define internal void @reset(ptr %table) {
entry:
  %count = load i64, ptr %table, align 8
  %state.at = getelementptr i8, ptr %table, i64 8
  %state = load ptr, ptr %state.at, align 8
  %length = load i64, ptr %state, align 8
  br label %launch
launch:
  %index = phi i64 [ 0, %entry ], [ %following, %close ]
  %sum = phi i64 [ 0, %entry ], [ %carried, %close ]
  %finished = icmp eq i64 %index, %count
  br i1 %finished, label %return, label %open
open:
  %scaled = shl i64 %index, 7
  %offset = add i64 %scaled, 64
  %record = getelementptr i8, ptr %table, i64 %offset
  %multiple.at = getelementptr i8, ptr %record, i64 16
  %multiple = load i64, ptr %multiple.at, align 8
  %divisor.at = getelementptr i8, ptr %record, i64 32
  %divisor = load i64, ptr %divisor.at, align 8
  %fixed = icmp eq i64 %divisor, 0
  br i1 %fixed, label %close, label %scale
scale:
  %addend.at = getelementptr i8, ptr %record, i64 24
  %addend = load i64, ptr %addend.at, align 8
  %reach = add i64 %length, %addend
  %rounded = add i64 %reach, %divisor
  %rounded.less = sub i64 %rounded, 1
  %quotient = sdiv i64 %rounded.less, %divisor
  %product = mul i64 %quotient, %multiple
  br label %close
close:
  %units = phi i64 [ %multiple, %open ], [ %product, %scale ]
  %units.at = getelementptr i8, ptr %record, i64 48
  store i64 %units, ptr %units.at, align 8
  %total = add i64 %sum, %units
  %need.at = getelementptr i8, ptr %record, i64 56
  store i64 %total, ptr %need.at, align 8
  %claimed = getelementptr i8, ptr %record, i64 64
  store i64 0, ptr %claimed, align 8
  %done = getelementptr i8, ptr %record, i64 72
  store i64 0, ptr %done, align 8
  %group.at = getelementptr i8, ptr %record, i64 88
  %group = load ptr, ptr %group.at, align 8
  %last = icmp eq ptr %group, %record
  %carried = select i1 %last, i64 0, i64 %total
  %following = add i64 %index, 1
  br label %launch
return:
  ret void
}

; The leader's call: one run of one table. Returns when every unit of every launch is done.
define void @dflash_run_body(ptr %pool, ptr %table) {
entry:
  %workers.at = getelementptr i8, ptr %pool, i64 72
  %workers = load i64, ptr %workers.at, align 8
  fence seq_cst
  br label %check
check:
  %worker = phi i64 [ 0, %entry ], [ %other, %absent ]
  %checked = icmp eq i64 %worker, %workers
  br i1 %checked, label %start, label %look
look:
  %shifted = shl i64 %worker, 6
  %place = add i64 %shifted, 128
  %inside.at = getelementptr i8, ptr %pool, i64 %place
  br label %probe
probe:
  %turn = phi i32 [ 0, %look ], [ %again, %busy ]
  %inside = load atomic ptr, ptr %inside.at seq_cst, align 8
  %here = icmp eq ptr %inside, %table
  br i1 %here, label %busy, label %absent
busy:
  call void @relax(i32 %turn)
  %again = add i32 %turn, 1
  br label %probe
absent:
  %other = add i64 %worker, 1
  br label %check
start:
  call void @reset(ptr %table)
  %current = getelementptr i8, ptr %pool, i64 64
  store atomic ptr %table, ptr %current release, align 8
  %old = atomicrmw add ptr %pool, i32 1 seq_cst
  %sleepers.at = getelementptr i8, ptr %pool, i64 80
  %sleepers = load atomic i32, ptr %sleepers.at seq_cst, align 4
  %asleep = icmp ne i32 %sleepers, 0
  br i1 %asleep, label %wake, label %go
wake:
  ; futex(sequence, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, all)
  %woken = call i64 (i64, ...) @syscall(i64 202, ptr %pool, i64 129, i64 2147483647, i64 0, i64 0, i64 0)
  br label %go
go:
  call void @walk(ptr %table, i1 true)
  ret void
}

; A worker's life: walk each table the leader publishes; spin, then yield, then sleep in between. Returns on stop.
define void @dflash_work_body(ptr %pool, i64 %worker) {
entry:
  %current = getelementptr i8, ptr %pool, i64 64
  %sleepers.at = getelementptr i8, ptr %pool, i64 80
  %stop.at = getelementptr i8, ptr %pool, i64 88
  %shifted = shl i64 %worker, 6
  %place = add i64 %shifted, 128
  %inside.at = getelementptr i8, ptr %pool, i64 %place
  br label %idle
idle:
  %known = phi i32 [ 0, %entry ], [ %sequence, %left ]
  br label %look
look:
  %turn = phi i32 [ 0, %idle ], [ %again, %rest ], [ 0, %slept ]
  %stop = load atomic i32, ptr %stop.at acquire, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %return, label %fresh
fresh:
  %sequence = load atomic i32, ptr %pool seq_cst, align 4
  %same = icmp eq i32 %sequence, %known
  br i1 %same, label %bide, label %enter
bide:
  %patient = icmp ult i32 %turn, 4096
  br i1 %patient, label %rest, label %sleep
rest:
  call void @relax(i32 %turn)
  %again = add i32 %turn, 1
  br label %look
sleep:
  %more = atomicrmw add ptr %sleepers.at, i32 1 seq_cst
  %expected = zext i32 %known to i64
  ; futex(sequence, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, known): returns at once if the sequence has moved
  %slept.for = call i64 (i64, ...) @syscall(i64 202, ptr %pool, i64 128, i64 %expected, i64 0, i64 0, i64 0)
  %fewer = atomicrmw sub ptr %sleepers.at, i32 1 seq_cst
  br label %slept
slept:
  br label %look
enter:
  %table = load atomic ptr, ptr %current acquire, align 8
  store atomic ptr %table, ptr %inside.at seq_cst, align 8
  fence seq_cst
  %now = load atomic i32, ptr %pool seq_cst, align 4
  %valid = icmp eq i32 %now, %sequence
  br i1 %valid, label %take, label %left
take:
  call void @walk(ptr %table, i1 false)
  br label %left
left:
  store atomic ptr null, ptr %inside.at seq_cst, align 8
  br label %idle
return:
  ret void
}

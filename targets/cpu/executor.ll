; The CPU executor: runs a bound launch table on a pool of threads. Kernels and this file form one shared library.
;
; A launch is a kernel `void (i64* arguments, i64 begin, i64 end)` and a number of independent units. Every thread has a
; share of them, side by side, so that it streams through its part of the weights; it claims `grain` of them at a time,
; and what is left of the others' shares when its own is used up. So a thread that the system has put aside delays at
; most one chunk, and nobody waits for a thread that has not claimed anything.
;
; Threads share three words each and nothing else: tables are only read, and nothing is reset between runs.
;   claim     launch number * 2^20 + units of the thread's share that are claimed in this launch, counted from unit 0.
;             Launch numbers begin with 1 and go on from run to run, so a word with a lower number is of a share not
;             yet begun, and one with a higher number of a launch that is done.
;   finished  units the thread has done since the pool began. A barrier waits until all threads' words add up to the
;             units of all launches so far: each word only grows, so a sum can come late but never early.
;   inside    the table a worker walks, so that nobody frees it.
;
; table:  header 64 B   {0 i64 launches, 8 ptr state, 16 ptr cycles}   state[0] = committed length n, in tokens
;         launch 64 B   {0 ptr kernel, 8 ptr arguments, 16 i64 multiple, 24 i64 addend, 32 i64 divisor, 40 i64 grain,
;                        48 i64 barrier}
;         units = multiple * ceil((n + addend) / divisor), or multiple where divisor = 0; n as the run began.
;         All wait after a launch whose `barrier` is not 0; launches up to there run at the same time.
;         `cycles` (i64 per launch) adds up what the leader spent in each launch, over all runs of the table.
; pool:   {0 i32 sequence, 8 ptr table, 16 i64 n, 24 i64 units finished before, 32 i64 launches before,
;          64 i64 threads, 72 i32 stop, 128 i32 sleepers, 192 + 192*t: {0 i64 claim, 64 i64 finished, 128 ptr inside}}
;         `sequence` is odd while the leader writes what follows it. Thread 0 is the leader, the caller.

; Version of the table's layout and of the kernels' signature; the runtime refuses another one.
define void @dflash_abi_body(ptr %version) {
  store i64 3, ptr %version, align 8
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

; The words of one thread.
define internal ptr @words(ptr %pool, i64 %thread) alwaysinline {
  %scaled = mul i64 %thread, 192
  %offset = add i64 %scaled, 192
  %words = getelementptr i8, ptr %pool, i64 %offset
  ret ptr %words
}

; Where the share of a thread begins; that of the next thread ends it.
define internal i64 @share(i64 %units, i64 %thread, i64 %threads) alwaysinline {
  %scaled = mul i64 %units, %thread
  %raised = add i64 %scaled, %threads
  %less = sub i64 %raised, 1
  %begin = udiv i64 %less, %threads
  ret i64 %begin
}

; Units that all threads have finished since the pool began.
define internal i64 @finished(ptr %pool, i64 %threads) alwaysinline {
entry:
  br label %add
add:
  %thread = phi i64 [ 0, %entry ], [ %following, %add ]
  %sum = phi i64 [ 0, %entry ], [ %total, %add ]
  %words = call ptr @words(ptr %pool, i64 %thread)
  %word = getelementptr i8, ptr %words, i64 64
  %count = load atomic i64, ptr %word acquire, align 8
  %total = add i64 %sum, %count
  %following = add i64 %thread, 1
  %all = icmp eq i64 %following, %threads
  br i1 %all, label %return, label %add
return:
  ret i64 %total
}

; Claim and do what is left of a thread's share of a launch; gives the units done.
define internal i64 @work(ptr %record, ptr %claim, i64 %launch, i64 %begin, i64 %limit) alwaysinline {
entry:
  %kernel = load ptr, ptr %record, align 8
  %arguments.at = getelementptr i8, ptr %record, i64 8
  %arguments = load ptr, ptr %arguments.at, align 8
  %grain.at = getelementptr i8, ptr %record, i64 40
  %grain = load i64, ptr %grain.at, align 8
  %tag = shl i64 %launch, 20
  br label %look
look:
  %done = phi i64 [ 0, %entry ], [ %done, %take ], [ %more, %run ]
  %seen = load atomic i64, ptr %claim monotonic, align 8
  %claimed = sub i64 %seen, %tag
  %unbegun = icmp slt i64 %claimed, 0
  %from = select i1 %unbegun, i64 %begin, i64 %claimed
  %exhausted = icmp sge i64 %from, %limit
  br i1 %exhausted, label %return, label %take
take:
  %whole = add i64 %from, %grain
  %clipped = icmp sgt i64 %whole, %limit
  %until = select i1 %clipped, i64 %limit, i64 %whole
  %new = add i64 %tag, %until
  %swapped = cmpxchg ptr %claim, i64 %seen, i64 %new monotonic monotonic
  %mine = extractvalue { i64, i1 } %swapped, 1
  br i1 %mine, label %run, label %look
run:
  call void %kernel(ptr %arguments, i64 %from, i64 %until)
  %size = sub i64 %until, %from
  %more = add i64 %done, %size
  br label %look
return:
  ret i64 %done
}

; Walk a table as one of the threads. `before`, `first`: units and launches finished before the run.
define internal void @walk(ptr %pool, ptr %table, i64 %n, i64 %before, i64 %first, i64 %me) {
entry:
  %threads.at = getelementptr i8, ptr %pool, i64 64
  %threads = load i64, ptr %threads.at, align 8
  %my.words = call ptr @words(ptr %pool, i64 %me)
  %my.finished = getelementptr i8, ptr %my.words, i64 64
  %count = load i64, ptr %table, align 8
  %cycles.at = getelementptr i8, ptr %table, i64 16
  %cycles = load ptr, ptr %cycles.at, align 8
  %leader = icmp eq i64 %me, 0
  %started = call i64 @llvm.readcyclecounter()
  br label %launch

launch:
  %index = phi i64 [ 0, %entry ], [ %following, %next ], [ %following, %note ]
  %needed = phi i64 [ %before, %entry ], [ %need, %next ], [ %need, %note ]
  %since = phi i64 [ %started, %entry ], [ %since, %next ], [ %now, %note ]
  %end = icmp eq i64 %index, %count
  br i1 %end, label %return, label %open
open:
  %scaled = shl i64 %index, 6
  %offset = add i64 %scaled, 64
  %record = getelementptr i8, ptr %table, i64 %offset
  %earlier.launches = add i64 %first, %index
  %number = add i64 %earlier.launches, 1
  %multiple.at = getelementptr i8, ptr %record, i64 16
  %multiple = load i64, ptr %multiple.at, align 8
  %divisor.at = getelementptr i8, ptr %record, i64 32
  %divisor = load i64, ptr %divisor.at, align 8
  %fixed = icmp eq i64 %divisor, 0
  br i1 %fixed, label %share, label %scale
scale:
  %addend.at = getelementptr i8, ptr %record, i64 24
  %addend = load i64, ptr %addend.at, align 8
  %reach = add i64 %n, %addend
  %raised = add i64 %reach, %divisor
  %less = sub i64 %raised, 1
  %quotient = sdiv i64 %less, %divisor
  %product = mul i64 %quotient, %multiple
  br label %share

share:
  %units = phi i64 [ %multiple, %open ], [ %product, %scale ]
  %need = add i64 %needed, %units
  br label %thread
thread:
  ; the own share, then those of the others, beginning with the next thread's
  %turn = phi i64 [ 0, %share ], [ %further, %unfinished ]
  %unwrapped = add i64 %me, %turn
  %wraps = icmp sge i64 %unwrapped, %threads
  %wrapped = sub i64 %unwrapped, %threads
  %whose = select i1 %wraps, i64 %wrapped, i64 %unwrapped
  %whose.next = add i64 %whose, 1
  %begin = call i64 @share(i64 %units, i64 %whose, i64 %threads)
  %limit = call i64 @share(i64 %units, i64 %whose.next, i64 %threads)
  %claim = call ptr @words(ptr %pool, i64 %whose)
  %done = call i64 @work(ptr %record, ptr %claim, i64 %number, i64 %begin, i64 %limit)
  %any = icmp ne i64 %done, 0
  br i1 %any, label %publish, label %published
publish:
  %earlier = load i64, ptr %my.finished, align 8
  %later = add i64 %earlier, %done
  store atomic i64 %later, ptr %my.finished release, align 8
  br label %published
published:
  %own = icmp eq i64 %turn, 0
  br i1 %own, label %survey, label %unfinished
survey:
  ; where all units are done there is nothing left to claim: leave the others' words alone
  %so.far = call i64 @finished(ptr %pool, i64 %threads)
  %all = icmp sge i64 %so.far, %need
  br i1 %all, label %next, label %unfinished
unfinished:
  %further = add i64 %turn, 1
  %others = icmp slt i64 %further, %threads
  br i1 %others, label %thread, label %leave

leave:
  %barrier.at = getelementptr i8, ptr %record, i64 48
  %barrier = load i64, ptr %barrier.at, align 8
  %joint = icmp ne i64 %barrier, 0
  br i1 %joint, label %wait, label %next
wait:
  %waited = phi i32 [ 0, %leave ], [ %again, %pause ]
  %reached = call i64 @finished(ptr %pool, i64 %threads)
  %complete = icmp sge i64 %reached, %need
  br i1 %complete, label %next, label %pause
pause:
  call void @relax(i32 %waited)
  %again = add i32 %waited, 1
  br label %wait

next:
  %following = add i64 %index, 1
  br i1 %leader, label %note, label %launch
note:
  %now = call i64 @llvm.readcyclecounter()
  %spent = sub i64 %now, %since
  %cell = getelementptr i64, ptr %cycles, i64 %index
  %altogether = load i64, ptr %cell, align 8
  %summed = add i64 %altogether, %spent
  store i64 %summed, ptr %cell, align 8
  br label %launch

return:
  ret void
}

; The leader's call: one run of one table. Returns when every unit of every launch is done.
define void @dflash_run_body(ptr %pool, ptr %table) {
entry:
  %threads.at = getelementptr i8, ptr %pool, i64 64
  %threads = load i64, ptr %threads.at, align 8
  %count = load i64, ptr %table, align 8
  %state.at = getelementptr i8, ptr %table, i64 8
  %state = load ptr, ptr %state.at, align 8
  %n = load i64, ptr %state, align 8
  %before = call i64 @finished(ptr %pool, i64 %threads)
  %first.at = getelementptr i8, ptr %pool, i64 32
  %last.count.at = getelementptr i8, ptr %pool, i64 40
  %last.first = load i64, ptr %first.at, align 8
  %last.count = load i64, ptr %last.count.at, align 8
  %first = add i64 %last.first, %last.count
  %odd = atomicrmw add ptr %pool, i32 1 seq_cst
  %table.at = getelementptr i8, ptr %pool, i64 8
  store atomic ptr %table, ptr %table.at release, align 8
  %n.at = getelementptr i8, ptr %pool, i64 16
  store atomic i64 %n, ptr %n.at release, align 8
  %before.at = getelementptr i8, ptr %pool, i64 24
  store atomic i64 %before, ptr %before.at release, align 8
  store atomic i64 %first, ptr %first.at release, align 8
  store i64 %count, ptr %last.count.at, align 8
  %even = atomicrmw add ptr %pool, i32 1 seq_cst
  %sleepers.at = getelementptr i8, ptr %pool, i64 128
  %sleepers = load atomic i32, ptr %sleepers.at seq_cst, align 4
  %asleep = icmp ne i32 %sleepers, 0
  br i1 %asleep, label %wake, label %go
wake:
  ; futex(sequence, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, all)
  %woken = call i64 (i64, ...) @syscall(i64 202, ptr %pool, i64 129, i64 2147483647, i64 0, i64 0, i64 0)
  br label %go
go:
  call void @walk(ptr %pool, ptr %table, i64 %n, i64 %before, i64 %first, i64 0)
  ret void
}

; A worker's life: walk each table the leader publishes; spin, then yield, then sleep in between. Returns on stop.
define void @dflash_work_body(ptr %pool, i64 %me) {
entry:
  %stop.at = getelementptr i8, ptr %pool, i64 72
  %sleepers.at = getelementptr i8, ptr %pool, i64 128
  %table.at = getelementptr i8, ptr %pool, i64 8
  %n.at = getelementptr i8, ptr %pool, i64 16
  %before.at = getelementptr i8, ptr %pool, i64 24
  %first.at = getelementptr i8, ptr %pool, i64 32
  %words = call ptr @words(ptr %pool, i64 %me)
  %inside.at = getelementptr i8, ptr %words, i64 128
  br label %idle
idle:
  %known = phi i32 [ 0, %entry ], [ %sequence, %left ]
  br label %look
look:
  %turn = phi i32 [ 0, %idle ], [ %again, %rest ], [ 0, %sleep ]
  %sequence = load atomic i32, ptr %pool seq_cst, align 4
  %same = icmp eq i32 %sequence, %known
  br i1 %same, label %bide, label %fresh
fresh:
  %lowest = and i32 %sequence, 1
  %writing = icmp ne i32 %lowest, 0
  br i1 %writing, label %rest, label %enter
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
  br label %look
enter:
  %stop = load atomic i32, ptr %stop.at acquire, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %return, label %read
read:
  %table = load atomic ptr, ptr %table.at acquire, align 8
  %n = load atomic i64, ptr %n.at acquire, align 8
  %before = load atomic i64, ptr %before.at acquire, align 8
  %first = load atomic i64, ptr %first.at acquire, align 8
  store atomic ptr %table, ptr %inside.at seq_cst, align 8
  fence seq_cst
  %now = load atomic i32, ptr %pool seq_cst, align 4
  %valid = icmp eq i32 %now, %sequence
  br i1 %valid, label %take, label %left
take:
  call void @walk(ptr %pool, ptr %table, i64 %n, i64 %before, i64 %first, i64 %me)
  br label %left
left:
  store atomic ptr null, ptr %inside.at seq_cst, align 8
  br label %idle
return:
  ret void
}

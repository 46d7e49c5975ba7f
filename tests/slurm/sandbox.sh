#!/usr/bin/env bash
# A SLURM of one node on loopback: no systemd, no cgroups, no accounting. As root:
#   SLURM_SANDBOX=<folder> sandbox.sh up|down
# Debian: apt-get install -y --no-install-recommends slurm-wlm munge
# It claims CPUs that the machine may not have, so that jobs of an array run side by side.
set -euo pipefail
ROOT=${SLURM_SANDBOX:?a folder of its own}
PORT=${SLURM_SANDBOX_PORT:-26817}         # slurmctld; slurmd takes the next one
CPUS=${SLURM_SANDBOX_CPUS:-4}
NODE=$(hostname -s)
MEMORY=$(( $(awk '/MemTotal/{print $2}' /proc/meminfo) / 1024 - 512 ))
export SLURM_CONF=$ROOT/slurm.conf

write_conf() {
  mkdir -p "$ROOT"/{state,spool,log,run}
  chmod 755 "$ROOT" "$ROOT/run"; chmod 700 "$ROOT/log"
  # cred_expire is also how long a requeued job waits (120 s by default, and where it is below 5).
  # The partition "urgent" preempts "debug", whose jobs are requeued.
  cat > "$SLURM_CONF" <<CONF
ClusterName=sandbox
SlurmctldHost=${NODE}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$ROOT/run/munge.socket,cred_expire=5
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MinJobAge=3600
KillWait=${SLURM_SANDBOX_KILL_WAIT:-20}
SlurmctldTimeout=30
SlurmdTimeout=60
SlurmdParameters=config_overrides
NodeName=$NODE NodeAddr=127.0.0.1 CPUs=$CPUS Sockets=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEMORY State=UNKNOWN
PartitionName=debug Nodes=$NODE Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=$NODE Default=NO MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

up() {
  write_conf
  [ -s "$ROOT/munge.key" ] || dd if=/dev/urandom of="$ROOT/munge.key" bs=1024 count=1 status=none
  chmod 400 "$ROOT/munge.key"
  alive "$ROOT/run/munged.pid" || munged --force --key-file="$ROOT/munge.key" \
      --socket="$ROOT/run/munge.socket" --pid-file="$ROOT/run/munged.pid" \
      --log-file="$ROOT/log/munged.log" --seed-file="$ROOT/run/munged.seed"
  alive "$ROOT/run/slurmctld.pid" || slurmctld -f "$SLURM_CONF"
  alive "$ROOT/run/slurmd.pid" || slurmd -f "$SLURM_CONF" -N "$NODE"
  for _ in $(seq 100); do
    sinfo -h -o %T 2>/dev/null | grep -qE '^(idle|mixed|allocated)' && return 0
    sleep 0.2
  done
  echo "the node is not ready: $(sinfo 2>&1)" >&2
  return 1
}

down() {
  for daemon in slurmd slurmctld munged; do
    if alive "$ROOT/run/$daemon.pid"; then
      pid=$(cat "$ROOT/run/$daemon.pid"); kill "$pid"
      for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
    fi
  done
}

case "${1:-}" in
  up) up ;;
  down) down ;;
  *) echo "usage: SLURM_SANDBOX=<folder> $0 up|down" >&2; exit 2 ;;
esac

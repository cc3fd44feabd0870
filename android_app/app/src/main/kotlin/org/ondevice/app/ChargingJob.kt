package org.ondevice.app

import android.app.job.JobInfo
import android.app.job.JobParameters
import android.app.job.JobScheduler
import android.app.job.JobService
import android.content.BroadcastReceiver
import android.content.ComponentName
import android.content.Context
import android.content.Intent

/**
 * A run that trains only while charging, and whose process is gone: the system calls each time that a charger is
 * connected, also after a reboot, until the run is over. While the process lives, [TrainService] hears of the charger
 * itself.
 */
class ChargingJob : JobService() {
    override fun onStartJob(parameters: JobParameters?): Boolean {
        WantedRun.goOn(this)
        return false
    }

    override fun onStopJob(parameters: JobParameters?) = false

    companion object {
        private const val ID = 1

        /** The shortest that Android allows; a job that is not periodic would be called for one charger alone. */
        private const val PERIOD_MS = 15L * 60 * 1000

        fun schedule(context: Context) {
            val job = JobInfo.Builder(ID, ComponentName(context, ChargingJob::class.java))
                .setRequiresCharging(true).setPeriodic(PERIOD_MS).setPersisted(true).build()
            scheduler(context).schedule(job)
        }

        fun cancel(context: Context) = scheduler(context).cancel(ID)

        private fun scheduler(context: Context) = context.getSystemService(Context.JOB_SCHEDULER_SERVICE) as JobScheduler
    }
}

/** A run goes on after a reboot, and after an update of the app, which ends its process. */
class BootReceiver : BroadcastReceiver() {
    override fun onReceive(context: Context, intent: Intent) {
        if (intent.action == Intent.ACTION_BOOT_COMPLETED || intent.action == Intent.ACTION_MY_PACKAGE_REPLACED) WantedRun.goOn(context)
    }
}

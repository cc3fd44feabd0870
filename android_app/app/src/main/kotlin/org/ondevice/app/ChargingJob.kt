package org.ondevice.app

import android.app.job.JobInfo
import android.app.job.JobParameters
import android.app.job.JobScheduler
import android.app.job.JobService
import android.content.ComponentName
import android.content.Context

/**
 * A run that trains only while charging, and whose process is gone: the system calls when a charger is connected.
 * While the process lives, [TrainService] hears of the charger itself.
 */
class ChargingJob : JobService() {
    override fun onStartJob(parameters: JobParameters?): Boolean {
        val app = application as OndeviceApp
        if (app.runs.live == null && app.wanted.read() != null) {
            try {
                startForegroundService(TrainService.intent(this))
            } catch (_: IllegalStateException) { // Android 12 and later, from the background
                Notifications(this).run { show(Notifications.WAITING, waiting()) }
            }
        }
        return false
    }

    override fun onStopJob(parameters: JobParameters?) = false

    companion object {
        private const val ID = 1

        fun schedule(context: Context) {
            val job = JobInfo.Builder(ID, ComponentName(context, ChargingJob::class.java)).setRequiresCharging(true).build()
            scheduler(context).schedule(job)
        }

        fun cancel(context: Context) = scheduler(context).cancel(ID)

        private fun scheduler(context: Context) = context.getSystemService(Context.JOB_SCHEDULER_SERVICE) as JobScheduler
    }
}

package org.ondevice.app

import android.app.Notification
import android.app.Service
import android.content.BroadcastReceiver
import android.content.Context
import android.content.Intent
import android.content.IntentFilter
import android.content.pm.ServiceInfo
import android.os.Build
import android.os.IBinder
import android.os.PowerManager
import org.ondevice.core.TrainerState

/**
 * Trains in the foreground, so that Android lets it work with the screen off and the user always sees it.
 *
 * The system may still kill the process: it starts the service again (START_STICKY), and the run goes on from its
 * last checkpoint, because [WantedRun] says that it is wanted.
 */
class TrainService : Service() {
    private val app get() = application as OndeviceApp
    private var wake: PowerManager.WakeLock? = null
    private var endThermal: (() -> Unit)? = null
    private var shownAtMs = 0L
    private val watcher: () -> Unit = ::follow

    /** Whether a fleet's round was begun whose end was not told yet. */
    private var round = false

    private val power = object : BroadcastReceiver() {
        override fun onReceive(context: Context, intent: Intent) = app.runs.healthChanged()
    }

    override fun onBind(intent: Intent?): IBinder? = null

    override fun onCreate() {
        super.onCreate()
        val filter = IntentFilter(Intent.ACTION_BATTERY_CHANGED).apply {
            addAction(Intent.ACTION_POWER_CONNECTED)
            addAction(Intent.ACTION_POWER_DISCONNECTED)
        }
        registerReceiver(power, filter)
        if (Build.VERSION.SDK_INT >= 29) endThermal = Thermal29.listen(this) { app.runs.healthChanged() }
        wake = (getSystemService(Context.POWER_SERVICE) as PowerManager).newWakeLock(PowerManager.PARTIAL_WAKE_LOCK, "ondevice:train")
        app.runs.watch(watcher)
        app.rounds.watch(watcher)
    }

    override fun onStartCommand(intent: Intent?, flags: Int, startId: Int): Int {
        try {
            toFront()
        } catch (_: IllegalStateException) { // Android 12 and later, when the system restarts the app unseen
            Notifications(this).run { show(Notifications.WAITING, waiting()) }
            stopSelf()
            return START_NOT_STICKY
        }
        when (intent?.action) {
            PAUSE -> app.runs.pause()
            RESUME -> app.runs.resume()
            STOP -> if (app.rounds.isWorking) app.rounds.stop() else app.runs.stop()
        }
        round = app.rounds.goOn() || round
        if (!app.runs.goOn() && app.runs.live == null && !round) stopSelf() else follow()
        return START_STICKY
    }

    private fun toFront() {
        val notification = notification()
        if (Build.VERSION.SDK_INT >= 34) Foreground34.start(this, Notifications.TRAINING, notification) else startForeground(Notifications.TRAINING, notification)
    }

    private fun notification(): Notification =
        Notifications(this).run { if (app.rounds.isWorking) round(app.rounds.live!!) else training(app.runs.live) }

    /** Keep the notification and the processor in step with the run; end with it. */
    private fun follow() {
        if (app.rounds.isWorking) {
            val reasons = app.rounds.live!!.reasons
            hold(reasons.isEmpty())
            return show(reasons.isNotEmpty())
        }
        if (round) app.rounds.live?.let { ended -> Notifications(this).run { show(Notifications.WAITING, roundOver(ended)) } }
        round = false
        val live = app.runs.live
        if (live == null || live.isOver) {
            if (live != null && !live.told) Notifications(this).run { show(Notifications.WAITING, over(live)) }
            live?.told = true
            stopSelf()
            return
        }
        hold(live.state !is TrainerState.Paused)
        show(live.state is TrainerState.Paused)
    }

    /** Put what holds now into the notification, if that is news. */
    private fun show(paused: Boolean) {
        val now = android.os.SystemClock.elapsedRealtime()
        if (paused || now - shownAtMs > NOTIFY_EVERY_MS) {
            shownAtMs = now
            Notifications(this).show(Notifications.TRAINING, notification())
        }
    }

    /** The processor stays awake while steps run; a pause lets the phone sleep. */
    private fun hold(working: Boolean) {
        val lock = wake ?: return
        if (working && !lock.isHeld) lock.acquire(WAKE_LIMIT_MS)
        if (!working && lock.isHeld) lock.release()
    }

    override fun onTrimMemory(level: Int) {
        app.health.onTrimMemory(level)
        app.runs.healthChanged()
    }

    override fun onDestroy() {
        app.runs.unwatch(watcher)
        app.rounds.unwatch(watcher)
        hold(false)
        endThermal?.invoke()
        unregisterReceiver(power)
        super.onDestroy()
    }

    companion object {
        const val PAUSE = "org.ondevice.app.PAUSE"
        const val RESUME = "org.ondevice.app.RESUME"
        const val STOP = "org.ondevice.app.STOP"
        private const val NOTIFY_EVERY_MS = 1000L
        private const val WAKE_LIMIT_MS = 24L * 3600 * 1000

        fun intent(context: Context, action: String? = null): Intent = Intent(context, TrainService::class.java).setAction(action)
    }
}

/** From Android 14 on a foreground service says what it is for. */
@Since(34)
object Foreground34 {
    fun start(service: Service, id: Int, notification: Notification) =
        service.startForeground(id, notification, ServiceInfo.FOREGROUND_SERVICE_TYPE_SPECIAL_USE)
}
